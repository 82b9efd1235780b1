"""As `gguf_draws`: the families with recurrent layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzz.gguf_draws import Drawn, experts, joined, latent, norms, sizes, widths
from fuzz.gguf_newer_draws import OF_EXPERTS, partial, plain, scales

OF_DELTA = frozenset({"attention.recurrent_layers", "full_attention_interval", "nextn_predict_layers"})


def recurrent(
    rng: random.Random, s: dict[str, Any], m: dict[str, Any], word: str, attends: str = "full_attention"
) -> list[bool]:
    """Draws for each layer whether it is recurrent, at least one of each kind: transformers wants attention."""
    count = s["num_hidden_layers"] = m["block_count"] = max(2, s["num_hidden_layers"])
    layers = [True, False] + [rng.random() < 0.6 for _ in range(count - 2)]
    rng.shuffle(layers)
    s["layer_types"] = [word if each else attends for each in layers]
    return layers


def counts(layers: list[bool], heads: int) -> dict[str, Any]:
    return {"attention.head_count_kv": [0 if each else heads for each in layers]}


def lfm2(rng: random.Random, mixture: bool) -> Drawn:
    s, m = plain(rng, kinds=(), name="norm_eps")
    s["conv_L_cache"] = m["shortconv.l_cache"] = rng.choice([2, 3, 4])
    m |= counts(recurrent(rng, s, m, "conv"), s["num_key_value_heads"])
    if not mixture:
        s |= {"block_auto_adjust_ff_dim": False, "conv_bias": rng.random() < 0.3}
        return Drawn("lfm2", "Lfm2Config", s, m, honoured=frozenset({"attention.sliding_window"}))
    s, m = joined((s, m), experts(rng, "num_experts", "moe_intermediate_size"))
    s["num_dense_layers"] = m["leading_dense_block_count"] = rng.choice([0, 1, 2])
    m["expert_gating_func"] = 2
    return Drawn("lfm2moe", "Lfm2MoeConfig", s | {"use_expert_bias": rng.random() < 0.8}, m, honoured=OF_EXPERTS)


def granite_hybrid(rng: random.Random) -> Drawn:
    s, m = joined(plain(rng, kinds=()), scales(rng))
    heads = rng.choice([n for n in (2, 4, 8) if 2 * s["hidden_size"] % n == 0])
    groups = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
    s |= {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": rng.choice([4, 6]),
          "mamba_d_conv": rng.choice([2, 4]), "mamba_conv_bias": rng.random() < 0.7,
          "mamba_proj_bias": rng.random() < 0.3, "shared_intermediate_size": s["intermediate_size"],
          "position_embedding_type": rng.choice(["rope", None]), "num_local_experts": 0}  # fmt: skip
    m |= {"ssm.conv_kernel": s["mamba_d_conv"], "ssm.state_size": s["mamba_d_state"], "ssm.group_count": groups,
          "ssm.inner_size": 2 * s["hidden_size"], "ssm.time_step_rank": heads,
          "rope.scaling.finetuned": s["position_embedding_type"] == "rope"}  # fmt: skip
    if rng.random() < 0.5:
        s, m = joined((s, m), experts(rng, "num_local_experts", None))
        s["shared_intermediate_size"] = m["expert_shared_feed_forward_length"] = rng.choice([8, 20])
    m |= counts(recurrent(rng, s, m, "mamba", "attention"), s["num_key_value_heads"])
    return Drawn("granitehybrid", "GraniteMoeHybridConfig", s, m, honoured=frozenset({"rope.scaling.finetuned"}))


def qwen(rng: random.Random, arch: str, config: str, mixture: bool) -> Drawn:
    s, m = plain(rng, True, kinds=())
    partial(rng, s, m)
    groups, keys, values = rng.choice([1, 2, 3]), rng.choice([4, 8]), rng.choice([4, 6])
    heads = groups * rng.choice([1, 2, 3])
    s |= {"linear_num_key_heads": groups, "linear_num_value_heads": heads, "linear_key_head_dim": keys,
          "linear_value_head_dim": values, "linear_conv_kernel_dim": rng.choice([2, 4]),
          "tie_word_embeddings": rng.random() < 0.3}  # fmt: skip
    layers = recurrent(rng, s, m, "linear_attention")
    m |= widths(s) | {
        "ssm.conv_kernel": s["linear_conv_kernel_dim"], "ssm.state_size": keys, "ssm.group_count": groups,
        "ssm.time_step_rank": heads, "ssm.inner_size": heads * values, "attention.recurrent_layers": layers,
        "full_attention_interval": rng.choice([None, 2, 4]),
    }  # fmt: skip
    if rng.random() < 0.5:  # older files say it by the interval
        every = rng.choice([2, 3, 4])
        layers = [i % every != every - 1 for i in range(len(layers))]
        s["layer_types"] = ["linear_attention" if each else "full_attention" for each in layers]
        m |= {
            "attention.recurrent_layers": None,
            "full_attention_interval": rng.choice([4, None]) if every == 4 else every,
        }
    if arch != "qwen3next":
        m["rope.dimension_sections"] = [11, 11, 10, 0]
    if mixture:
        s, m = joined((s, m), experts(rng, "num_experts", "moe_intermediate_size"))
        s["shared_expert_intermediate_size"] = m["expert_shared_feed_forward_length"] = rng.choice([8, 20])
        if arch == "qwen35moe":
            m["feed_forward_length"] = None
    return Drawn(arch, config, s, m, honoured=OF_DELTA | OF_EXPERTS | {"rope.dimension_sections"})


def kimi_linear(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, kv=False), norms(rng), experts(rng, "num_local_experts", "moe_intermediate_size"))
    latent(rng, s, m)
    turned = s["qk_rope_head_dim"]
    s |= {"linear_num_heads": s["num_attention_heads"], "linear_head_dim": rng.choice([4, 8]),
          "linear_conv_kernel_dim": rng.choice([2, 4])}  # fmt: skip
    m |= {"expert_group_count": rng.choice([1, None]), "expert_group_used_count": rng.choice([1, None])}
    if s["num_local_experts"] > 2 and rng.random() < 0.4:
        s["n_group"], s["topk_group"] = 2, rng.choice([1, 2])
        m |= {"expert_group_count": 2, "expert_group_used_count": s["topk_group"]}
    m |= {"attention.key_length": s["kv_lora_rank"] + turned, "attention.value_length": rng.choice([None, turned]),
          "attention.key_length_mla": s["qk_nope_head_dim"] + turned, "attention.value_length_mla": s["v_head_dim"],
          "kda.head_dim": s["linear_head_dim"], "ssm.conv_kernel": s["linear_conv_kernel_dim"],
          "expert_gating_func": 2}  # fmt: skip
    m |= counts(recurrent(rng, s, m, "linear_attention"), 1)
    return Drawn("kimi-linear", "KimiLinearConfig", s, m, honoured=OF_EXPERTS)


HYBRIDS: dict[str, Callable[[random.Random], Drawn]] = {
    "lfm2": lambda rng: lfm2(rng, False),
    "lfm2moe": lambda rng: lfm2(rng, True),
    "granitehybrid": granite_hybrid,
    "qwen35": lambda rng: qwen(rng, "qwen35", "Qwen3_5TextConfig", False),
    "qwen35moe": lambda rng: qwen(rng, "qwen35moe", "Qwen3_5MoeTextConfig", True),
    "qwen3next": lambda rng: qwen(rng, "qwen3next", "Qwen3NextConfig", True),
    "kimi-linear": kimi_linear,
}
