"""Random configurations of transformers with the metadata that llama.cpp's converter writes of them: for `ggufs`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

TOKENS = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
KINDS = ["sliding_attention", "full_attention"]
Both = tuple[dict[str, Any], dict[str, Any]]
"""(settings of transformers, metadata of the file)"""


class Drawn(NamedTuple):
    arch: str
    config: str  # class of transformers
    settings: dict[str, Any]
    metadata: dict[str, Any]
    absorbed: bool = False
    honoured: frozenset[str] = frozenset()  # keys beside `ggufs.HONOURED` that have a meaning in this architecture


def sizes(rng: random.Random, head_dim: bool = False, kv: bool = True, wide: bool = False) -> Both:
    """(settings, metadata) that all families have. wide: a third has rows of 256 numbers, the blocks of K types."""
    heads, dim = rng.choice([1, 2, 4]), rng.choice([4, 8, 12, 16])
    wide = wide and not head_dim and rng.random() < 1 / 3
    if wide:
        dim = 256 // heads
    width = rng.choice([16, 32, 48]) if head_dim else heads * dim
    if head_dim and width % heads == 0 and width // heads % 2 == 0 and rng.random() < 0.3:
        dim = width // heads
    settings = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": rng.choice([1, 2, 3, 4, 5]),
        "max_position_embeddings": rng.choice([20, 64]),
        "intermediate_size": rng.choice([32, 256] if wide else [8, 24, 48]),
    }
    metadata = {
        "embedding_length": width,
        "attention.head_count": heads,
        "block_count": settings["num_hidden_layers"],
        "context_length": settings["max_position_embeddings"],
        "feed_forward_length": settings["intermediate_size"],
        "vocab_size": rng.choice([96, None]),
    }
    if kv:
        settings["num_key_value_heads"] = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
        metadata["attention.head_count_kv"] = settings["num_key_value_heads"]
        if settings["num_key_value_heads"] == heads:
            metadata["attention.head_count_kv"] = rng.choice([heads, None])
    if head_dim:
        settings["head_dim"] = dim
    if dim != width // heads or rng.random() < 0.5:
        metadata |= {"attention.key_length": dim, "attention.value_length": dim}
    if rng.random() < 0.5:
        metadata["rope.dimension_count"] = dim
    return settings | TOKENS, metadata


def norms(rng: random.Random, name: str = "rms_norm_eps", layer: bool = False) -> Both:
    eps = rng.choice([1e-6, 1e-5, 1e-3, 0.1])
    return {name: eps}, {"attention.layer_norm_epsilon" if layer else "attention.layer_norm_rms_epsilon": eps}


def rope(rng: random.Random, kinds: tuple[str, ...] = ()) -> Both:
    base = rng.choice([50.0, 700.0, 10000.0, 1e6])
    kind = rng.choice(["default", "default", *kinds])
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    metadata: dict[str, Any] = {"rope.freq_base": rng.choice([base, None]) if base == 10000.0 else base}
    if kind in ("linear", "yarn"):
        settings["factor"] = rng.choice([1.0, 2.5, 4.0])
        metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": settings["factor"]}
        if kind == "linear" and rng.random() < 0.3:  # as old files have it
            metadata = {"rope.freq_base": base, "rope.scale_linear": settings["factor"]}
    elif rng.random() < 0.3:
        metadata |= {"rope.scaling.type": "none"}
    if kind == "yarn":
        settings["original_max_position_embeddings"] = rng.choice([8, 16])
        metadata["rope.scaling.original_context_length"] = settings["original_max_position_embeddings"]
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if rng.random() < 0.3:
                settings[ours] = {"beta_fast": 16.0, "beta_slow": 2.0}[ours]
                metadata[f"rope.scaling.{theirs}"] = settings[ours]
    if kind == "llama3":
        settings |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
        settings["original_max_position_embeddings"] = rng.choice([8, 16])
    return {"rope_parameters": settings}, metadata


def joined(*parts: Both) -> Both:
    settings, metadata = {}, {}
    for of_transformers, of_file in parts:
        settings |= of_transformers
        metadata |= of_file
    return settings, metadata


def widths(settings: dict[str, Any]) -> dict[str, Any]:
    """The widths of a head, which the converter writes where the configuration has them."""
    return {"attention.key_length": settings["head_dim"], "attention.value_length": settings["head_dim"]}


SCALED = ("linear", "yarn")


def llama(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, rng.random() < 0.3, wide=True), norms(rng), rope(rng, ("linear", "yarn", "llama3")))
    s |= {key: rng.random() < 0.3 for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")}
    return Drawn("llama", "LlamaConfig", s, m)


def mistral(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, rng.random() < 0.3, wide=True), norms(rng), rope(rng))
    s["sliding_window"] = m["attention.sliding_window"] = rng.choice([None, 1, 3, 7, 64])
    return Drawn("llama", "MistralConfig", s, m)


def qwen2(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, wide=True), norms(rng), rope(rng, SCALED))
    return Drawn("qwen2", "Qwen2Config", s | {"tie_word_embeddings": rng.random() < 0.5}, m)


def qwen3(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, True), norms(rng), rope(rng, SCALED))
    m |= widths(s)
    return Drawn("qwen3", "Qwen3Config", s | {"tie_word_embeddings": rng.random() < 0.5}, m)


def experts(rng: random.Random, name: str, width: str | None) -> Both:
    count = rng.choice([2, 4, 6])
    settings = {name: count, "num_experts_per_tok": rng.choice([1, 2])}
    metadata = {"expert_count": count, "expert_used_count": settings["num_experts_per_tok"]}
    if width is not None:
        settings[width] = metadata["expert_feed_forward_length"] = rng.choice([8, 12])
    return settings, metadata


def qwen3moe(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, True), norms(rng), rope(rng, SCALED), experts(rng, "num_experts", "moe_intermediate_size"))
    s |= {"norm_topk_prob": True, "tie_word_embeddings": rng.random() < 0.3}
    m |= widths(s)
    return Drawn("qwen3moe", "Qwen3MoeConfig", s, m)


def gemma2(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, True), norms(rng), rope(rng))
    s["query_pre_attn_scalar"] = s["head_dim"]
    for key, usual in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        s[key] = rng.choice([0.7, usual])
        m[key] = rng.choice([usual, None]) if s[key] == usual else s[key]
    s["sliding_window"] = m["attention.sliding_window"] = rng.choice([1, 5, 40])
    s["layer_types"] = [KINDS[i % 2] for i in range(s["num_hidden_layers"])]
    return Drawn("gemma2", "Gemma2Config", s, m)


def gemma3(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, True), norms(rng), rope(rng, ("linear",)))
    own = rng.choice([10000.0, 70.0])
    s["rope_parameters"] = {
        "full_attention": s["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": own},
    }
    m["rope.freq_base_swa"] = rng.choice([own, None]) if own == 10000.0 else own
    s["query_pre_attn_scalar"] = s["head_dim"]
    s["sliding_window"] = m["attention.sliding_window"] = rng.choice([1, 5, 40])
    period = rng.choice([1, 2, 3, 6])
    m["attention.sliding_window_pattern"] = rng.choice([6, None]) if period == 6 else period
    s["layer_types"] = [KINDS[(i + 1) % period == 0] for i in range(s["num_hidden_layers"])]
    return Drawn("gemma3", "Gemma3TextConfig", s, m)


def phi3(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng), norms(rng), rope(rng))
    dim = s["hidden_size"] // s["num_attention_heads"]
    part = rng.choice([0.5, 1.0]) if dim % 4 == 0 else 1.0
    m["rope.dimension_count"] = int(part * dim)
    s["rope_parameters"]["partial_rotary_factor"] = part
    s["sliding_window"] = m["attention.sliding_window"] = rng.choice([None, 3, 64])
    s["original_max_position_embeddings"] = s["max_position_embeddings"]
    if rng.random() < 0.6:
        half = int(part * dim) // 2
        s["original_max_position_embeddings"] = trained = rng.choice([8, 16])
        s["rope_parameters"] |= {
            "rope_type": "longrope",
            "short_factor": [rng.uniform(1, 2) for _ in range(half)],
            "long_factor": [rng.uniform(1, 9) for _ in range(half)],
        }
        m["rope.scaling.original_context_length"] = trained
        scale = s["max_position_embeddings"] / trained
        m["rope.scaling.attn_factor"] = float(
            (1 + torch.tensor(scale).log() / torch.tensor(float(trained)).log()).sqrt()
        )
        m.pop("rope.scaling.type", None)
    return Drawn("phi3", "Phi3Config", s | {"tie_word_embeddings": rng.random() < 0.3}, m)


def olmo2(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng), norms(rng), rope(rng, SCALED))
    return Drawn("olmo2", "Olmo2Config", s, m)


def starcoder2(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng), norms(rng, "norm_epsilon", layer=True), rope(rng, SCALED))
    s |= {"use_bias": rng.random() < 0.7, "sliding_window": None, "tie_word_embeddings": rng.random() < 0.5}
    return Drawn("starcoder2", "Starcoder2Config", s, m)


def of_gpt2(rng: random.Random) -> Both:
    s, m = joined(sizes(rng, kv=False), norms(rng, "layer_norm_epsilon", layer=True))
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
             "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}  # fmt: skip
    m.pop("rope.dimension_count", None)
    return {names.get(key, key): value for key, value in s.items()}, m


def gpt2(rng: random.Random) -> Drawn:
    return Drawn("gpt2", "GPT2Config", *of_gpt2(rng))


def starcoder(rng: random.Random) -> Drawn:
    s, m = of_gpt2(rng)
    return Drawn("starcoder", "GPTBigCodeConfig", s | {"multi_query": True}, m | {"attention.head_count_kv": 1})


def falcon(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, kv=False), norms(rng, "layer_norm_epsilon", layer=True), rope(rng))
    s["ffn_hidden_size"] = s.pop("intermediate_size")
    s["tie_word_embeddings"] = rng.random() < 0.7
    if rng.random() < 0.5:
        kv = rng.choice([n for n in (1, 2, 4) if s["num_attention_heads"] % n == 0])
        s |= {"new_decoder_architecture": True, "num_kv_heads": kv}
    else:
        s["multi_query"], kv = True, 1
    m["attention.head_count_kv"] = kv
    return Drawn("falcon", "FalconConfig", s, m)


def gpt_oss(rng: random.Random) -> Drawn:
    s, m = joined(sizes(rng, True), norms(rng), rope(rng, ("yarn", "yarn")), experts(rng, "num_local_experts", None))
    m |= widths(s)
    m["expert_feed_forward_length"] = s["intermediate_size"]
    if s["rope_parameters"]["rope_type"] == "yarn":
        s["rope_parameters"]["truncate"] = False
    s["sliding_window"] = m["attention.sliding_window"] = rng.choice([1, 5, 40])
    s["layer_types"] = [KINDS[i % 2] for i in range(s["num_hidden_layers"])]
    return Drawn("gpt-oss", "GptOssConfig", s, m)


def latent(rng: random.Random, s: dict[str, Any], m: dict[str, Any]) -> None:
    """Latent heads, and experts that a few dense layers precede, as DeepSeek has them."""
    s |= {"num_key_value_heads": s["num_attention_heads"], "kv_lora_rank": rng.choice([8, 10]),
          "q_lora_rank": rng.choice([None, 12]), "qk_nope_head_dim": rng.choice([4, 8]),
          "qk_rope_head_dim": rng.choice([2, 4, 6]), "v_head_dim": rng.choice([6, 9]),
          "n_shared_experts": rng.choice([1, 2]), "first_k_dense_replace": rng.choice([0, 1, 2]),
          "routed_scaling_factor": rng.choice([1.0, 1.5]), "n_group": 1, "topk_group": 1}  # fmt: skip
    m |= {"attention.kv_lora_rank": s["kv_lora_rank"], "attention.q_lora_rank": s["q_lora_rank"],
          "rope.dimension_count": s["qk_rope_head_dim"], "leading_dense_block_count": s["first_k_dense_replace"],
          "expert_shared_count": s["n_shared_experts"], "expert_weights_scale": s["routed_scaling_factor"]}  # fmt: skip


def deepseek(rng: random.Random, third: bool) -> Drawn:
    s, m = joined(
        sizes(rng, kv=False),
        norms(rng),
        rope(rng, ("yarn",)),
        experts(rng, "n_routed_experts", "moe_intermediate_size"),
    )
    latent(rng, s, m)
    heads, turned, rank = s["num_attention_heads"], s["qk_rope_head_dim"], s["kv_lora_rank"]
    wide = s["qk_nope_head_dim"] + turned
    if third:
        s["norm_topk_prob"] = m["expert_weights_norm"] = rng.random() < 0.7
        m["expert_gating_func"] = 2
        if s["n_routed_experts"] > 2 and rng.random() < 0.5:
            s["n_group"], s["topk_group"] = 2, rng.choice([1, 2])
    m |= {"expert_group_count": s["n_group"], "expert_group_used_count": s["topk_group"]}
    if s["n_group"] == 1:
        m |= {"expert_group_count": rng.choice([1, None]), "expert_group_used_count": rng.choice([1, None])}
    absorbed = rng.random() < 0.5
    if absorbed:
        m |= {"attention.head_count_kv": 1, "attention.key_length": rank + turned, "attention.value_length": rank,
              "attention.key_length_mla": wide, "attention.value_length_mla": s["v_head_dim"]}  # fmt: skip
    else:
        m |= {"attention.head_count_kv": heads, "attention.key_length": wide, "attention.value_length": s["v_head_dim"]}
    if s["rope_parameters"]["rope_type"] == "yarn":
        power = rng.choice([0.7, 1.0])
        s["rope_parameters"] |= {"mscale": power, "mscale_all_dim": power}
        m["rope.scaling.yarn_log_multiplier"] = 0.1 * power
    honoured = frozenset({"expert_gating_func", "expert_weights_norm", "rope.scaling.yarn_log_multiplier"})
    return Drawn("deepseek2", f"DeepseekV{3 if third else 2}Config", s, m, absorbed, honoured)


OLDER: dict[str, Callable[[random.Random], Drawn]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "olmo2": olmo2,
    "starcoder2": starcoder2,
    "gpt2": gpt2,
    "starcoder": starcoder,
    "falcon": falcon,
    "gpt-oss": gpt_oss,
    "deepseek_v2": lambda rng: deepseek(rng, False),
    "deepseek_v3": lambda rng: deepseek(rng, True),
}
