"""As `gguf_draws`: the families that llama.cpp has had since 2025, and older ones with LayerNorm."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzz.gguf_draws import KINDS, SCALED, Both, Drawn, experts, joined, norms, rope, sizes, widths

SCALES = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
          "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"}  # fmt: skip
OF_EXPERTS = frozenset({"expert_gating_func", "expert_weights_norm"})


def plain(rng: random.Random, head_dim: bool = False, kinds: tuple[str, ...] = SCALED, **norm: Any) -> Both:
    return joined(sizes(rng, head_dim), norms(rng, **norm), rope(rng, kinds))


def partial(rng: random.Random, s: dict[str, Any], m: dict[str, Any]) -> None:
    """Only the first dims of a head rotate, if at least a pair does."""
    dim = s.get("head_dim") or s["hidden_size"] // s["num_attention_heads"]
    part = rng.choice([part for part in (0.25, 0.5, 1.0) if int(part * dim) % 2 == 0 and part * dim >= 2])
    s["rope_parameters"]["partial_rotary_factor"] = part
    m["rope.dimension_count"] = int(part * dim)


def windows(rng: random.Random, s: dict[str, Any], m: dict[str, Any], period: int = 4) -> None:
    """Windows in all but the last of each `period` layers, as this architecture has them; the file may list them."""
    s["sliding_window"] = m["attention.sliding_window"] = rng.choice([1, 5, 40])
    slides = [i % period != period - 1 for i in range(s["num_hidden_layers"])]
    s["layer_types"] = [KINDS[not each] for each in slides]
    m["attention.sliding_window_pattern"] = rng.choice([None, slides])


def scales(rng: random.Random) -> Both:
    drawn = {name: rng.choice([0.4, 1.0, 3.0]) for name in SCALES}
    return drawn, {SCALES[name]: value for name, value in drawn.items()}


def smollm3(rng: random.Random) -> Drawn:
    s, m = plain(rng)
    return Drawn("smollm3", "SmolLM3Config", s | {"tie_word_embeddings": rng.random() < 0.5}, m)


def granite(rng: random.Random) -> Drawn:
    s, m = joined(plain(rng), scales(rng))
    return Drawn("granite", "GraniteConfig", s | {"mlp_bias": rng.random() < 0.3}, m)


def granite_moe(rng: random.Random) -> Drawn:
    s, m = joined(plain(rng), scales(rng), experts(rng, "num_local_experts", None))
    s |= {"layer_types": ["attention"] * s["num_hidden_layers"], "mamba_n_heads": 2 * s["hidden_size"]}
    s["shared_intermediate_size"] = m["expert_shared_feed_forward_length"] = rng.choice([8, 20])
    rotates = rng.random() < 0.5
    s["position_embedding_type"] = "rope" if rotates else None
    m["rope.scaling.finetuned"] = rng.choice([True, None]) if rotates else False
    return Drawn("granitemoe", "GraniteMoeHybridConfig", s, m, honoured=frozenset({"rope.scaling.finetuned"}))


def cohere2(rng: random.Random) -> Drawn:
    s, m = plain(rng, kinds=(), name="layer_norm_eps", layer=True)
    s["logit_scale"] = m["logit_scale"] = rng.choice([0.4, 1.0])
    windows(rng, s, m)
    return Drawn("cohere2", "Cohere2Config", s, m)


def glm4(rng: random.Random) -> Drawn:
    s, m = plain(rng, True, kinds=())
    partial(rng, s, m)
    return Drawn("glm4", "Glm4Config", s | {"attention_bias": rng.random() < 0.5}, m | widths(s))


def exaone4(rng: random.Random) -> Drawn:
    s, m = plain(rng, kinds=())
    windows(rng, s, m)
    return Drawn("exaone4", "Exaone4Config", s, m)


def olmo3(rng: random.Random) -> Drawn:
    s, m = plain(rng, kinds=())
    windows(rng, s, m)
    s["rope_parameters"] = {kind: s["rope_parameters"] for kind in KINDS}
    return Drawn("olmo2", "Olmo3Config", s, m)


def seed_oss(rng: random.Random) -> Drawn:
    s, m = plain(rng, True)
    return Drawn("seed_oss", "SeedOssConfig", s | {"attention_bias": rng.random() < 0.7}, m | widths(s))


def ernie4_5(rng: random.Random) -> Drawn:
    s, m = plain(rng, True, kinds=())
    s |= {"use_bias": rng.random() < 0.3, "tie_word_embeddings": rng.random() < 0.5}
    return Drawn("ernie4_5", "Ernie4_5Config", s, m | widths(s))


def hunyuan(rng: random.Random) -> Drawn:
    s, m = plain(rng, True, kinds=())
    return Drawn("hunyuan-dense", "HunYuanDenseV1Config", s, m | widths(s))


def arcee(rng: random.Random) -> Drawn:
    s, m = plain(rng, rng.random() < 0.5)
    return Drawn("arcee", "ArceeConfig", s, m)


def phi2(rng: random.Random) -> Drawn:
    s, m = plain(rng, kinds=(), name="layer_norm_eps", layer=True)
    partial(rng, s, m)
    return Drawn("phi2", "PhiConfig", s, m)


def gptneox(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, kv=False), norms(rng, "layer_norm_eps", layer=True), rope(rng))
    partial(rng, s, m)
    s["use_parallel_residual"] = m["use_parallel_residual"] = rng.random() < 0.7
    return Drawn("gptneox", "GPTNeoXConfig", s, m)


def stablelm(rng: random.Random) -> Drawn:
    s, m = plain(rng, kinds=(), name="layer_norm_eps", layer=True)
    partial(rng, s, m)
    s["use_parallel_residual"] = m["use_parallel_residual"] = rng.random() < 0.5
    return Drawn("stablelm", "StableLmConfig", s | {"use_qkv_bias": rng.random() < 0.5}, m)


def minimax_m2(rng: random.Random) -> Drawn:
    s, m = joined(plain(rng, True, kinds=()), experts(rng, "num_local_experts", None))
    partial(rng, s, m)
    m |= widths(s) | {"expert_feed_forward_length": s["intermediate_size"], "expert_gating_func": 2}
    return Drawn("minimax-m2", "MiniMaxM2Config", s, m, honoured=OF_EXPERTS)


def llama4(rng: random.Random) -> Drawn:
    s, m = joined(plain(rng, True, kinds=("llama3",)), experts(rng, "num_local_experts", "intermediate_size"))
    if rng.random() < 0.1:
        s["num_local_experts"] = m["expert_count"] = 128
    s |= {"use_qk_norm": s["num_local_experts"] != 128, "intermediate_size_mlp": m["feed_forward_length"]}
    s |= {"attention_bias": rng.random() < 0.3, "tie_word_embeddings": rng.random() < 0.3}
    s["interleave_moe_layer_step"] = m["interleave_moe_layer_step"] = rng.choice([1, 2, 3])
    return Drawn("llama4", "Llama4TextConfig", s, m | widths(s), honoured=OF_EXPERTS)


def gemma4(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, True), norms(rng), rope(rng))
    wide, count, base = rng.choice([4, 8, 16]), s["num_hidden_layers"], rng.choice([10000.0, 70.0])
    slides = [rng.random() < 0.6 for _ in range(count - 1)] + [False]
    shared = rng.choice([n for n in range(count) if {*slides[: count - n]} == {*slides}])
    part = rng.choice([0.25, 0.5, 1.0])
    whole = {"rope_type": "proportional", "partial_rotary_factor": part,
             "rope_theta": s["rope_parameters"]["rope_theta"]}  # fmt: skip
    s |= {"global_head_dim": wide, "layer_types": [KINDS[not each] for each in slides], "num_kv_shared_layers": shared,
          "hidden_size_per_layer_input": rng.choice([0, 6]), "vocab_size_per_layer_input": 96,
          "attention_k_eq_v": rng.random() < 0.4, "use_double_wide_mlp": rng.random() < 0.5,
          "final_logit_softcapping": rng.choice([None, 0.7]), "sliding_window": rng.choice([1, 5, 40]),
          "rope_parameters": {"full_attention": whole,
                              "sliding_attention": {"rope_type": "default", "rope_theta": base}}}  # fmt: skip
    m |= {"attention.key_length": wide, "attention.value_length": wide, "rope.dimension_count": wide,
          "attention.key_length_swa": s["head_dim"], "attention.value_length_swa": s["head_dim"],
          "rope.dimension_count_swa": s["head_dim"], "attention.sliding_window": s["sliding_window"],
          "attention.sliding_window_pattern": slides, "attention.shared_kv_layers": shared,
          "embedding_length_per_layer_input": s["hidden_size_per_layer_input"],
          "final_logit_softcapping": s["final_logit_softcapping"],
          "rope.freq_base_swa": rng.choice([base, None]) if base == 10000.0 else base}  # fmt: skip
    m.pop("rope.scaling.type", None)
    if s["attention_k_eq_v"] and rng.random() < 0.6:
        heads = rng.choice([n for n in (1, 2, 4) if s["num_attention_heads"] % n == 0])
        s["num_global_key_value_heads"] = heads
        m["attention.head_count_kv"] = [s["num_key_value_heads"] if each else heads for each in slides]
    if s["use_double_wide_mlp"]:
        m["feed_forward_length"] = [s["intermediate_size"] * (1 + (i >= count - shared)) for i in range(count)]
    return Drawn("gemma4", "Gemma4TextConfig", s, m)


NEWER: dict[str, Callable[[random.Random], Drawn]] = {
    "smollm3": smollm3,
    "granite": granite,
    "granitemoe": granite_moe,
    "cohere2": cohere2,
    "glm4": glm4,
    "exaone4": exaone4,
    "olmo3": olmo3,
    "seed_oss": seed_oss,
    "ernie4_5": ernie4_5,
    "hunyuan": hunyuan,
    "arcee": arcee,
    "phi2": phi2,
    "gptneox": gptneox,
    "stablelm": stablelm,
    "minimax-m2": minimax_m2,
    "llama4": llama4,
    "gemma4": gemma4,
}
