"""The architectures of GGUF files in which most layers are recurrent: as `gguf_families`. The facts are those of
llama.cpp's converter: decays are stored as -exp(A_log), convolutions without the dim of 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .gguf_families import _EXPERTS, Architecture, _plain_experts, _rotated
from .gguf_newer_families import _FACTORS, _SHARED, _granite, _granite_moe
from .gguf_parts import Part, channels_first, cut_heads, group_heads, log_decay
from .gguf_settings import GgufSettings

_Parts = dict[str, tuple[Part, ...]]

_SHORT = {"shortconv.in_proj": "self_attn.in_proj", "shortconv.out_proj": "self_attn.out_proj",
          "shortconv.conv": "self_attn.conv"}  # fmt: skip
_MAMBA = {"ssm_in": "self_attn.in_proj", "ssm_out": "self_attn.out_proj", "ssm_conv1d": "self_attn.conv1d"}
_DELTA = {"attn_gate": "self_attn.in_proj_z", "ssm_norm": "self_attn.norm", "ssm_out": "self_attn.out_proj",
          "attn_qkv": "self_attn.in_proj_qkv", "post_attention_norm": "post_attention_layernorm"}  # fmt: skip
_QWEN = ("full_attention_interval", "nextn_predict_layers", "rope.dimension_count")


def _recurrent(kind: str, layers: list[bool], **settings: Any) -> dict[str, Any]:
    """Options of a model with these recurrent layers."""
    if not any(layers):
        return {}
    options: dict[str, Any] = {"recurrent": {"kind": kind, **settings}}
    if not all(layers):
        options["layer_settings"] = [{"recurrent": each} for each in layers]
    return options


def _without_keys(file: GgufSettings, num_layers: int) -> list[bool]:
    """Layers for which attention.head_count_kv lists no heads. A count for all layers says that all attend."""
    counts = file.setting("attention.head_count_kv")
    if not isinstance(counts, list):
        return [False] * num_layers
    if len(counts) != num_layers:
        raise ValueError(
            f"{file.path}: {file.arch}.attention.head_count_kv lists {len(counts)} counts, wants one for each of "
            f"{num_layers} layers"
        )
    return [count == 0 for count in counts]


def _all_but_each(file: GgufSettings, num_layers: int) -> list[bool]:
    """Layers that attention.recurrent_layers lists, or all but the last of each full_attention_interval."""
    listed = file.setting("attention.recurrent_layers")
    if listed is None:
        every = file.size("full_attention_interval", 4)
        return [layer % every != every - 1 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or not all(type(each) is bool for each in listed):
        raise ValueError(
            f"{file.path}: {file.arch}.attention.recurrent_layers is {listed!r:.80}, wants True or False for each of "
            f"{num_layers} layers"
        )
    return listed[:num_layers]


def _width_by_head(file: GgufSettings) -> int:
    width, heads = file.size("ssm.inner_size"), file.size("ssm.time_step_rank")
    if width % heads:
        raise ValueError(
            f"{file.path}: {file.arch}.ssm.inner_size is {width}, wants a multiple of ssm.time_step_rank, {heads}"
        )
    return width // heads


def _lfm2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    file.refuse("attention.sliding_window")
    bias = any(name.endswith("self_attn.in_proj.bias") for name in file.shapes)
    layers = _without_keys(file, config["num_layers"])
    taps = file.size("shortconv.l_cache")
    return _recurrent("gated_convolution", layers, conv_kernel_size=taps, bias=bias) | {
        "bias": False,
        "out_bias": False,
    }


def _granite_hybrid(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    # llama.cpp normalises each group by itself, transformers all groups as one.
    file.refuse("ssm.group_count", usual=(1,))
    attention = _granite_moe if file.setting("expert_count") else _granite
    return attention(file, config) | _recurrent(
        "mamba2",
        _without_keys(file, config["num_layers"]),
        num_v_heads=file.size("ssm.time_step_rank"),
        num_k_heads=1,
        head_k_dim=file.size("ssm.state_size"),
        head_v_dim=_width_by_head(file),
        conv_kernel_size=file.size("ssm.conv_kernel"),
        conv_bias=any(name.endswith("self_attn.conv1d.bias") for name in file.shapes),
        bias=any(name.endswith("self_attn.in_proj.bias") for name in file.shapes),
    )


def _mamba_parts(file: GgufSettings) -> _Parts:
    return {
        "ssm_a": (Part("self_attn.A_log", lambda x: log_decay(x).flatten()),),
        "ssm_d": (Part("self_attn.D", lambda x: x.flatten()),),
        "ssm_dt.bias": (Part("self_attn.dt_bias"),),
        "ssm_conv1d.weight": (Part("self_attn.conv1d.weight", channels_first),),
        "ssm_norm.weight": (Part("self_attn.norm.weight", lambda x: x.flatten()),),
    }


def _qwen(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Norms are stored as 1 + weight. Text has the same place in all sections of the rotated dims."""
    recurrent = _recurrent(
        "gated_delta_net",
        _all_but_each(file, config["num_layers"]),
        num_k_heads=file.size("ssm.group_count"),
        num_v_heads=file.size("ssm.time_step_rank"),
        head_k_dim=file.size("ssm.state_size"),
        head_v_dim=_width_by_head(file),
        conv_kernel_size=file.size("ssm.conv_kernel"),
    )
    scores = {"gate": "element"} | _rotated(file, config).get("scores", {})
    return recurrent | {"scores": scores}


def _qwen3_next(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = file.size("expert_shared_feed_forward_length")
    return _qwen(file, config) | {"experts": _plain_experts(file, True, shared_dim=shared, shared_gate=True)}


def _gated_parts(file: GgufSettings) -> _Parts:
    """Queries of a head that its gate follows."""
    heads = file.size("attention.head_count")
    width = file.size("attention.key_length", file.size("embedding_length") // heads)
    return {
        "attn_q.weight": tuple(
            Part(f"self_attn.{name}_proj.weight", cut_heads(heads, (width, width), which), rows=True)
            for which, name in enumerate(("q", "gate"))
        ),
        "ssm_a": (Part("self_attn.A_log", log_decay),),
        "ssm_dt.bias": (Part("self_attn.dt_bias"),),
        "ssm_conv1d.weight": (Part("self_attn.conv1d.weight", channels_first),),
    }


def _qwen3_next_parts(file: GgufSettings) -> _Parts:
    groups = file.size("ssm.group_count")
    each = file.size("ssm.time_step_rank") // groups
    return _gated_parts(file) | {
        "ssm_ba.weight": tuple(
            Part(f"self_attn.in_proj_{name}.weight", cut_heads(groups, (each, each), which), rows=True)
            for which, name in enumerate("ba")
        ),
        "ffn_gate_inp_shexp.weight": (Part("mlp.shared_expert_gate.weight", lambda x: x.view(1, -1)),),
    }


def _qwen3_5_parts(file: GgufSettings) -> _Parts:
    """The heads of values are stored by turns of those of keys."""
    groups, heads = file.size("ssm.group_count"), file.size("ssm.time_step_rank")
    by_head = group_heads(groups, heads)
    behind_keys = group_heads(groups, heads, first=2 * groups * file.size("ssm.state_size"))
    by_column = group_heads(groups, heads, dim=1)
    return _gated_parts(file) | {
        "attn_qkv.weight": (Part("self_attn.in_proj_qkv.weight", behind_keys, rows=True),),
        "attn_gate.weight": (Part("self_attn.in_proj_z.weight", by_head, rows=True),),
        "ssm_alpha.weight": (Part("self_attn.in_proj_a.weight", by_head, rows=True),),
        "ssm_beta.weight": (Part("self_attn.in_proj_b.weight", by_head, rows=True),),
        "ssm_out.weight": (Part("self_attn.out_proj.weight", by_column),),
        "ssm_a": (Part("self_attn.A_log", lambda x: by_head(log_decay(x))),),
        "ssm_dt.bias": (Part("self_attn.dt_bias", by_head),),
        "ssm_conv1d.weight": (Part("self_attn.conv1d.weight", lambda x: channels_first(behind_keys(x))),),
    }


HYBRIDS = {
    "lfm2": Architecture(
        _lfm2,
        _SHORT,
        hybrid=True,
        parts=lambda file: {
            "token_embd_norm.weight": (Part("model.norm.weight"),),
            "shortconv.conv.weight": (Part("self_attn.conv.weight", channels_first),),
        },
    ),
    "granitehybrid": Architecture(
        _granite_hybrid,
        _EXPERTS | _SHARED | _MAMBA,
        interleaved=True,
        settings=(*_FACTORS, "expert_count"),
        hybrid=True,
        parts=_mamba_parts,
    ),
    "qwen35": Architecture(
        _qwen, _DELTA, settings=(*_QWEN, "rope.dimension_sections"), hybrid=True, parts=_qwen3_5_parts
    ),
    "qwen3next": Architecture(
        _qwen3_next,
        _EXPERTS | _SHARED | _DELTA,
        settings=(*_QWEN, "expert_count"),
        hybrid=True,
        parts=_qwen3_next_parts,
    ),
}
