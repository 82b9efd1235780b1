"""Attention layers of transformers by names and numbers: one table of the families whose layer is ours. The model's
rotation is an argument of their layers, so a test makes one table for both."""

import importlib

import attnpack
import pytest
import torch
from hf_families import make_config
from torch.testing import assert_close

E, HEADS, KV_HEADS, DIM, BASE = 32, 4, 2, 8, 100.0
GATED = {"gate": "element", "qk_norm": {"plus_one": True}}
HEAD_GATED = {"gate": "head", "qk_norm": True}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
FULL = {"layer_types": ["full_attention"] * 2}
ALL_HEADS = {"qk_norm": {"all_heads": True}}
# model_type: the layer's class, settings of the configuration, and the options of ours beside those of all.
# `rotated` dims are rotated, 0 for none; the default is all.
GROUPED = {
    "qwen3_next": ("Qwen3NextAttention", {}, GATED | {"rotated": 4}),
    "qwen3_5_text": ("Qwen3_5Attention", {}, GATED | {"rotated": 4}),
    "qwen3_5_moe_text": ("Qwen3_5MoeAttention", {}, GATED | {"rotated": 4}),
    "step3p5": ("Step3p7Attention", FULL, {"gate": "head", "qk_norm": {"plus_one": True}, "rotated": 4}),
    "laguna": ("LagunaAttention", FULL, HEAD_GATED | {"gate_activation": "softplus", "rotated": 4}),
    "lfm3": ("Lfm3Attention", FULL | {"use_attention_gate": True}, HEAD_GATED),
    "afmoe": ("AfmoeAttention", SLIDING, {"gate": "element", "qk_norm": True}),
    "afmoe, full": ("AfmoeAttention", FULL, {"gate": "element", "qk_norm": True, "rotated": 0}),
    "muse_glimmer_text": ("MuseGlimmerTextAttention", SLIDING, {"gate": "element", "qk_norm": True}),
    "gpt_oss": ("GptOssAttention", {}, {"sinks": True, "bias": True}),
    "granite_swa": ("GraniteSWAAttention", {}, {"sinks": True}),
    "granitemoe_swa": ("GraniteMoeSWAAttention", {}, {"sinks": True}),
    "flint": ("FlintAttention", SLIDING, {"sinks": True, "qk_norm": True}),
    "flint, full": ("FlintAttention", FULL, {"sinks": True, "qk_norm": True, "rotated": 0}),
    "qwen3": ("Qwen3Attention", {}, {"qk_norm": True}),
    "hy_v3": ("HYV3Attention", {}, {"qk_norm": True}),
    "minimax_m2": ("MiniMaxM2Attention", {}, ALL_HEADS | {"rotated": 4}),
    "olmo2": ("Olmo2Attention", {}, ALL_HEADS),
    "olmo3": ("Olmo3Attention", {}, ALL_HEADS),
    "flex_olmo": ("FlexOlmoAttention", {}, ALL_HEADS),
    "glm4_moe": ("Glm4MoeAttention", {"use_qk_norm": True}, {"qk_norm": True, "rotated": 4}),
    "exaone4": ("Exaone4Attention", SLIDING, {"qk_norm": True}),
    "exaone4, full": ("Exaone4Attention", FULL | {"sliding_window": 64}, {"qk_norm": True, "rotated": 0}),
    "kolibri1": ("Kolibri1Attention", SLIDING, {"qk_norm": True}),
    "smollm3": ("SmolLM3Attention", {"no_rope_layers": [1, 0]}, {}),
    "smollm3, without RoPE": ("SmolLM3Attention", {"no_rope_layers": [0, 1]}, {"rotated": 0}),
    "seed_oss": ("SeedOssAttention", {}, {"bias": True, "out_bias": False}),
    "mellum": ("MellumAttention", {}, {"qk_norm": True}),
    "dots1": ("Dots1Attention", {}, {"qk_norm": True}),
    "gemma2": ("Gemma2Attention", {"attn_logit_softcapping": 0.5}, {"softcap": 0.5}),
    "gemma3_text": ("Gemma3Attention", {}, {"qk_norm": {"plus_one": True}}),
    "cohere2": ("Cohere2Attention", SLIDING, {"interleaved": True}),
    "ernie4_5": ("Ernie4_5Attention", {}, {"interleaved": True}),
    "glm4": ("Glm4Attention", {"attention_bias": False}, {"interleaved": True, "rotated": 4}),
}
# Whose name is not that of their folder: Step-3.7 reads the text settings of Step-3.5.
FOLDERS = {"step3p5": "step3p7"}
# transformers gives them cosines of one half, or of neighbours twice; the others get those of two equal halves.
TABLES = {"gpt_oss": lambda half: half, "cohere2": lambda half: half.repeat_interleave(2, -1)}
# Their eager weights lack the sinks, which scale the output.
WITHOUT_SINKS = ("granite_swa", "granitemoe_swa")
# The same for latent attention.
LATENT = {
    "deepseek_v3": ("DeepseekV3Attention", {}, {}),
    "glm4_moe_lite": ("Glm4MoeLiteAttention", {}, {}),
    "youtu": ("YoutuAttention", {}, {}),
    "axk1": ("AXK1Attention", {}, {}),
    "minicpm3": ("MiniCPM3Attention", {}, {"interleaved": False}),
    "bailing_hybrid": ("BailingHybridAttention", {}, {"gate": "head"}),
    "longcat_flash": ("LongcatFlashMLA", {}, {}),
    "kimi_linear": ("KimiLinearAttention", {}, {"rotated": 0}),
}


def layer_of(kind, name, settings, **changes):
    """(configuration, a layer of transformers with random parameters)."""
    family = kind.split(",")[0]
    config = make_config(family, **settings | changes)
    config._attn_implementation = "eager"
    folder = FOLDERS.get(family, family.removesuffix("_text"))
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(0)
    layer = getattr(modeling, name)(config, 0, *([HEADS] if family == "laguna" else [])).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)
    return config, layer


def rotation(kind, options, width, length, interleaved=False):
    """(our rope, cos and sin [B, L, ...] as transformers makes them) for the `rotated` dims of options."""
    dims = options.pop("rotated", width)
    if dims == 0:
        return None, (torch.zeros(2, length, width),) * 2
    interleaved = options.pop("interleaved", interleaved)
    angles = torch.arange(length).unsqueeze(1) * BASE ** -(torch.arange(0, dims, 2) / dims)
    angles = TABLES.get(kind, lambda half: half.repeat(1, 2))(angles).expand(2, -1, -1)
    return attnpack.RotaryEmbedding(dims, base=BASE, interleaved=interleaved), (angles.cos(), angles.sin())


def causal_mask(x):
    seen = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).expand(x.size(0), 1, -1, -1)


def called(layer, x, table, **inputs):
    positions = torch.arange(x.size(1)).expand(x.size(0), -1)
    others = {"position_embeddings": table, "attention_mask": causal_mask(x), "position_ids": positions}
    return layer(x, **others | inputs)


def our_names(layer, tensors):
    """The tensors under our names. A doubled q_proj, in which each head's gate follows its queries, is taken apart, and
    LongCat's factors on the latents go into the projections that read them. Muse's norm has one factor for all."""
    made = {}
    for name, tensor in tensors.items():
        if name == "q_proj.weight" and "k_proj.weight" in tensors and tensor.size(0) == 2 * HEADS * DIM:
            query, gate = tensor.unflatten(0, (HEADS, 2 * DIM)).split(DIM, dim=1)
            made |= {"q_proj.weight": query.flatten(0, 1), "gate_proj.weight": gate.flatten(0, 1)}
            continue
        factor = {"q_b_proj.weight": "mla_scale_q_lora", "kv_b_proj.weight": "mla_scale_kv_lora"}.get(name)
        made[name.replace("g_proj.", "gate_proj.") if name.startswith("g_proj.") else name] = tensor * getattr(
            layer, factor or "", 1.0
        )
    if hasattr(layer, "qk_scale_factor"):
        made |= {"q_norm.weight": torch.full((DIM,), layer.qk_scale_factor), "k_norm.weight": torch.ones(DIM)}
    return made


def compare(kind, layer, table, ours, x):
    """Outputs, weights and gradients of both, and of the twin in C++."""
    ours.load_state_dict(our_names(layer, layer.state_dict()), strict=True)
    wanted, weights = called(layer, x, table)
    for each in (ours, ours.cpp()):
        out, own_weights = each.forward(x, need_weights=True)
        assert_close(out, wanted, atol=2e-5, rtol=1e-5)
        if kind not in WITHOUT_SINKS:
            assert_close(own_weights, weights, atol=1e-5, rtol=1e-5)
    wanted.square().sum().backward()
    ours(x).square().sum().backward()
    theirs = our_names(layer, {name: p.grad for name, p in layer.named_parameters()})
    for name, parameter in ours.named_parameters():
        if not (name.endswith("_norm.weight") and hasattr(layer, "qk_scale_factor")):
            factor = {"q_b_proj.weight": "mla_scale_q_lora", "kv_b_proj.weight": "mla_scale_kv_lora"}.get(name, "")
            grad = parameter.grad * getattr(layer, factor, 1.0) ** 2
            assert_close(grad, theirs[name], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_layers_by_names_and_numbers(kind):
    name, settings, options = GROUPED[kind]
    _, layer = layer_of(kind, name, settings)
    options = dict(options)
    rope, table = rotation(kind, options, DIM, 9)
    norm = getattr(layer, "q_norm", getattr(layer, "qk_norm", None))
    if norm is not None:
        norms = options["qk_norm"] if isinstance(options["qk_norm"], dict) else {}
        options["qk_norm"] = norms | {"eps": getattr(norm, "eps", getattr(norm, "variance_epsilon", None))}
    ours = attnpack.GroupedQueryAttention(
        E, HEADS, KV_HEADS, head_dim=DIM, causal=True, rope=rope, scale=layer.scaling, **options
    )
    compare(kind, layer, table, ours.eval(), torch.randn(2, 9, E))


def latent_options(config, layer):
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: getattr(config, name, None) for name in names} | {"causal": True, "scale": layer.scaling}


@pytest.mark.parametrize("kind", LATENT)
def test_latent_layers_by_names_and_numbers(kind):
    name, settings, options = LATENT[kind]
    config, layer = layer_of(kind, name, settings, num_key_value_heads=HEADS)
    options = dict(options)
    rope, table = rotation(kind, options, 8, 9, interleaved=True)
    ours = attnpack.MultiHeadLatentAttention(E, HEADS, rope=rope, **latent_options(config, layer) | options)
    compare(kind, layer, table, ours.eval(), torch.randn(2, 9, E))


@torch.no_grad()
def test_qwen4_by_names_and_numbers():
    """Over the keys that its own indexer leaves: the indexer is not ours."""
    _, layer = layer_of("qwen4_exp_text", "Qwen4ExpTextAttention", INDEXER_OF_QWEN4)
    options, x = dict(GATED | {"rotated": 4}), torch.randn(2, 9, E)
    rope, table = rotation("qwen4_exp_text", options, DIM, 9)
    norm = options["qk_norm"] | {"eps": layer.q_norm.eps}
    ours = attnpack.GroupedQueryAttention(E, HEADS, KV_HEADS, head_dim=DIM, rope=rope, gate="element", qk_norm=norm)
    tensors = {name: t for name, t in layer.state_dict().items() if not name.startswith("indexer.")}
    ours.load_state_dict(our_names(layer, tensors), strict=True)
    wanted, _ = called(layer, x, table)
    chosen = layer.indexer(x, table, causal_mask(x), None)
    assert chosen.sum() < 2 * 45  # some of the 45 pairs of a causal mask are left out
    for each in (ours.eval(), ours.cpp()):
        assert_close(each.forward(x, mask=chosen), wanted, atol=2e-5, rtol=1e-5)


INDEXER_OF_QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
                    "indexer_compress_ratio": 2}  # fmt: skip
INDEXER_OF_GLM = {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 16}
RELATIVES_OF_DSA = {"deepseek_v32": "DeepseekV32Attention", "glm_moe_dsa": "GlmMoeDsaAttention"}


@pytest.mark.parametrize("kind", RELATIVES_OF_DSA)
def test_sparse_latent_layers_by_names_and_numbers(kind):
    """GLM-5's indexer rotates interleaved pairs."""
    config, layer = layer_of(kind, RELATIVES_OF_DSA[kind], INDEXER_OF_GLM, num_key_value_heads=HEADS)
    rope, table = rotation(kind, {}, 8, 11, interleaved=True)
    indexer = {"top_k": 4, "index_heads": 16, "index_head_dim": 16, "index_interleaved": kind == "glm_moe_dsa"}
    options = latent_options(config, layer) | indexer
    ours = attnpack.SparseLatentAttention(E, HEADS, rope=rope, **options).eval()
    ours.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(2, 11, E)
    wanted = called(layer, x, table)[0]
    assert attnpack.SparseLatentAttention.from_cpp(ours.cpp()).index_interleaved == ours.index_interleaved
    for each, classes in ((ours, attnpack), (ours.cpp(), attnpack.cpp)):
        assert_close(each.forward(x), wanted, atol=2e-5, rtol=1e-5)
        cache = classes.LatentCache()
        with torch.no_grad():
            steps = [each.forward(part, cache=cache) for part in x.split([6, 1, 4], 1)]
        assert_close(torch.cat(steps, 1), wanted, atol=2e-5, rtol=1e-5)
    wanted.square().sum().backward()
    ours(x).square().sum().backward()
    theirs = dict(layer.named_parameters())
    for name, parameter in ours.named_parameters():
        if not name.startswith("indexer."):
            assert_close(parameter.grad, theirs[name].grad, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "glm5_next_text"])
def test_a_layer_of_glm_5_reads_the_selection_of_another(kind):
    """GLM-5 Next rotates nothing."""
    name = {"glm_moe_dsa": "GlmMoeDsaAttention", "glm5_next_text": "Glm5NextTextAttention"}[kind]
    settings = INDEXER_OF_GLM | {"indexer_types": ["shared", "full"]}
    settings |= {"index_kpool": 2, "qk_rope_head_dim": 0} if kind == "glm5_next_text" else {}
    config, layer = layer_of(kind, name, settings, num_key_value_heads=HEADS)
    rope, table = rotation(kind, {"rotated": 0} if kind == "glm5_next_text" else {}, 8, 11, interleaved=True)
    ours = attnpack.MultiHeadLatentAttention(E, HEADS, rope=rope, **latent_options(config, layer)).eval()
    ours.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(2, 11, E)
    named = torch.rand(2, 11, 11).masked_fill(causal_mask(x)[:, 0] < 0, -1).topk(4).indices.int()
    named = named.where(named <= torch.arange(11).view(-1, 1), 0)  # GLM-5 Next's selection is causal by itself
    wanted = called(layer, x, table, prev_topk_indices=named)[0]
    for each in (ours, ours.cpp()):
        assert_close(each.forward(x, key_index=named.unsqueeze(1)), wanted, atol=2e-5, rtol=1e-5)
