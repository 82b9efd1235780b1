"""The architectures of GGUF files in which most layers are recurrent: as `gguf_families`. The facts are those of
llama.cpp's converter: decays are stored as -exp(A_log), convolutions without the dim of 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import cat

from .gguf_experts import (
    CORRECTION,
    EXPERTS,
    SHARED,
    SIGMOID,
    corrected,
    dense_first,
    grouped_experts,
    join_layers,
    plain_experts,
    sigmoid_experts,
)
from .gguf_families import LATENT, Architecture, _rotated, join_latent_heads, latent
from .gguf_newer_families import _FACTORS, _granite, _granite_moe
from .gguf_parts import Recipe, channels_first, cut_heads, group_heads, log_decay, one
from .gguf_settings import GgufSettings

_SHORT = {"shortconv.in_proj": "self_attn.in_proj", "shortconv.out_proj": "self_attn.out_proj",
          "shortconv.conv": "self_attn.conv"}  # fmt: skip
_MAMBA = {"ssm_in": "self_attn.in_proj", "ssm_out": "self_attn.out_proj", "ssm_conv1d": "self_attn.conv1d"}
_DELTA = {"attn_gate": "self_attn.in_proj_z", "ssm_norm": "self_attn.norm", "ssm_out": "self_attn.out_proj",
          "attn_qkv": "self_attn.in_proj_qkv", "post_attention_norm": "post_attention_layernorm"}  # fmt: skip
_KIMI_DELTA = {"ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm"} | {
    f"ssm_{gate}_{half}": f"self_attn.{place}{gate}_{half}_proj"
    for gate, place in (("f", "forget_gate."), ("g", ""))
    for half in "ab"
}
_COUNTS = ("attention.head_count_kv",)
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
    counts = file.by_layer("attention.head_count_kv", num_layers, file.size("attention.head_count"), least=0)
    if len({*counts} - {0}) != 1:
        raise ValueError(f"{file.path}: head counts that differ from layer to layer are not supported")
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


def _lfm2_moe(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    mixture = {"experts": sigmoid_experts(file, normalize=True, correction=corrected(file))}
    return join_layers(_lfm2(file, config) | mixture, dense_first(file, config["num_layers"]))


def _short_recipes(file: GgufSettings) -> list[Recipe]:
    return [
        one("token_embd_norm.weight", "model.norm.weight"),
        one("shortconv.conv.weight", "self_attn.conv.weight", channels_first),
    ]


def _granite_hybrid(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    attention = _granite_moe if file.setting("expert_count") else _granite
    return attention(file, config) | _recurrent(
        "mamba2",
        _without_keys(file, config["num_layers"]),
        num_v_heads=file.size("ssm.time_step_rank"),
        num_k_heads=file.size("ssm.group_count"),
        head_k_dim=file.size("ssm.state_size"),
        head_v_dim=_width_by_head(file),
        conv_kernel_size=file.size("ssm.conv_kernel"),
        conv_bias=any(name.endswith("self_attn.conv1d.bias") for name in file.shapes),
        bias=any(name.endswith("self_attn.in_proj.bias") for name in file.shapes),
    )


def _mamba_recipes(file: GgufSettings) -> list[Recipe]:
    return [
        one("ssm_a", "self_attn.A_log", lambda x: log_decay(x).flatten()),
        one("ssm_d", "self_attn.D", lambda x: x.flatten()),
        one("ssm_dt.bias", "self_attn.dt_bias"),
        one("ssm_conv1d.weight", "self_attn.conv1d.weight", channels_first),
        one("ssm_norm.weight", "self_attn.norm.weight", lambda x: x.flatten()),
    ]


def _kimi_linear(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing rotates. Heads of recurrent layers are as many as those of attention."""
    recurrent = _recurrent(
        "kimi_delta_attention",
        _without_keys(file, config["num_layers"]),
        num_v_heads=config["num_heads"],
        head_k_dim=file.size("kda.head_dim"),
        conv_kernel_size=file.size("ssm.conv_kernel"),
    )
    options = latent(file, config) | {"position_embedding": "none", "rope_scaling": None} | recurrent
    mixture = {"experts": grouped_experts(file, normalize=True, gating=SIGMOID)}
    return join_layers(options | mixture, dense_first(file, config["num_layers"]))


def _kimi_recipes(file: GgufSettings) -> list[Recipe]:
    convolutions = tuple(f"ssm_conv1d_{name}.weight" for name in "qkv")
    return [
        *join_latent_heads(file),
        Recipe(convolutions, ("self_attn.conv1d.weight",), lambda *x: [cat([channels_first(each) for each in x])]),
        one("ssm_a", "self_attn.forget_gate.A_log", lambda x: log_decay(x).reshape(1, 1, -1, 1)),
        one("ssm_dt.bias", "self_attn.forget_gate.dt_bias"),
    ]


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


def _qwen_moe(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = file.size("expert_shared_feed_forward_length")
    return _qwen(file, config) | {"experts": plain_experts(file, True, shared_dim=shared, shared_gate=True)}


def _queries_and_gate(file: GgufSettings) -> Recipe:
    """Queries of a head that its gate follows."""
    heads = file.size("attention.head_count")
    width = file.size("attention.key_length", file.size("embedding_length") // heads)
    both = ("self_attn.q_proj.weight", "self_attn.gate_proj.weight")
    return Recipe(("attn_q.weight",), both, cut_heads(heads, width, width), rows=True)


def _shared_gate() -> Recipe:
    return one("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", lambda x: x.view(1, -1))


def _qwen3_next_recipes(file: GgufSettings) -> list[Recipe]:
    groups = file.size("ssm.group_count")
    each = file.size("ssm.time_step_rank") // groups
    both = ("self_attn.in_proj_b.weight", "self_attn.in_proj_a.weight")
    return [
        _queries_and_gate(file),
        Recipe(("ssm_ba.weight",), both, cut_heads(groups, each, each), rows=True),
        one("ssm_a", "self_attn.A_log", log_decay),
        one("ssm_dt.bias", "self_attn.dt_bias"),
        one("ssm_conv1d.weight", "self_attn.conv1d.weight", channels_first),
        _shared_gate(),
    ]


def _qwen3_5_recipes(file: GgufSettings) -> list[Recipe]:
    """The heads of values are stored by turns of those of keys."""
    groups, heads = file.size("ssm.group_count"), file.size("ssm.time_step_rank")
    by_head = group_heads(groups, heads)
    behind_keys = group_heads(groups, heads, first=2 * groups * file.size("ssm.state_size"))
    by_column = group_heads(groups, heads, dim=1)
    return [
        _queries_and_gate(file),
        one("attn_qkv.weight", "self_attn.in_proj_qkv.weight", behind_keys, rows=True),
        one("attn_gate.weight", "self_attn.in_proj_z.weight", by_head, rows=True),
        one("ssm_alpha.weight", "self_attn.in_proj_a.weight", by_head, rows=True),
        one("ssm_beta.weight", "self_attn.in_proj_b.weight", by_head, rows=True),
        one("ssm_out.weight", "self_attn.out_proj.weight", by_column),
        one("ssm_a", "self_attn.A_log", lambda x: by_head(log_decay(x))),
        one("ssm_dt.bias", "self_attn.dt_bias", by_head),
        one("ssm_conv1d.weight", "self_attn.conv1d.weight", lambda x: channels_first(behind_keys(x))),
    ]


HYBRIDS = {
    "lfm2": Architecture(_lfm2, _SHORT, listed=_COUNTS, recipes=_short_recipes),
    "lfm2moe": Architecture(
        _lfm2_moe,
        EXPERTS | CORRECTION | _SHORT,
        settings=("expert_count",),
        listed=_COUNTS,
        recipes=_short_recipes,
    ),
    "granitehybrid": Architecture(
        _granite_hybrid,
        EXPERTS | SHARED | _MAMBA,
        interleaved=True,
        settings=(*_FACTORS, "expert_count"),
        listed=_COUNTS,
        recipes=_mamba_recipes,
    ),
    "qwen35": Architecture(_qwen, _DELTA, settings=(*_QWEN, "rope.dimension_sections"), recipes=_qwen3_5_recipes),
    "qwen35moe": Architecture(
        _qwen_moe,
        EXPERTS | SHARED | _DELTA,
        settings=(*_QWEN, "rope.dimension_sections", "expert_count"),
        recipes=lambda file: [*_qwen3_5_recipes(file), _shared_gate()],
    ),
    "qwen3next": Architecture(
        _qwen_moe, EXPERTS | SHARED | _DELTA, settings=(*_QWEN, "expert_count"), recipes=_qwen3_next_recipes
    ),
    "kimi-linear": Architecture(
        _kimi_linear,
        EXPERTS | SHARED | CORRECTION | LATENT | _KIMI_DELTA,
        settings=("expert_count", "attention.value_length", "rope.dimension_count"),
        listed=_COUNTS,
        recipes=_kimi_recipes,
    ),
}
