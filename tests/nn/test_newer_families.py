"""Attention layers of newer families of transformers by names and numbers: gates, keys as values, shared keys, blocks
of keys that an indexer chooses."""

import importlib

import attnpack
import pytest
import torch
import transformers
from attnpack.ops import select_blocks
from torch.testing import assert_close
from transformers import DynamicCache as HfCache

E, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
SIZES = {
    "hidden_size": E, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
    "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 64, "intermediate_size": 16,
    "attn_implementation": "eager",
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
FULL = {"layer_types": ["full_attention"] * 2}
# The folder of the family, its config's and its layer's names, settings of the config, and what makes our layer equal.
FAMILIES = {
    "qwen3_next": ("Qwen3Next", "", {**ROPE, **FULL}, {"gate": "element", "qk_norm": {"plus_one": True}}),
    "qwen3_5": ("Qwen3_5", "Text", {**ROPE, **FULL}, {"gate": "element", "qk_norm": {"plus_one": True}}),
    "laguna": ("Laguna", "", FULL, {"gate": "head", "gate_activation": "softplus", "qk_norm": True}),
    "lfm3": ("Lfm3", "", {**FULL, "rope_parameters": {"full_attention": ROPE["rope_parameters"]},
                          "use_attention_gate": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
             {"gate": "head", "qk_norm": True}),
    "afmoe": ("Afmoe", "", {**ROPE, "layer_types": ["sliding_attention"] * 2, "sliding_window": 64},
              {"gate": "element", "qk_norm": True}),
}  # fmt: skip


def randomise(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)


def modeling_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def positions_and_mask(x, past=0):
    positions = past + torch.arange(x.size(1)).expand(x.size(0), -1)
    seen = torch.arange(past + x.size(1)) <= positions[0].unsqueeze(-1)
    return positions, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def our_names(tensors):
    """The tensors under our names: a doubled q_proj, in which each head's gate follows its queries, is taken apart."""
    made = {}
    for name, tensor in tensors.items():
        if name == "q_proj.weight" and tensor.size(0) == 2 * HEADS * DIM:
            query, gate = tensor.unflatten(0, (HEADS, 2 * DIM)).split(DIM, dim=1)
            made |= {"q_proj.weight": query.flatten(0, 1), "gate_proj.weight": gate.flatten(0, 1)}
        else:
            made[name.replace("g_proj.", "gate_proj.") if name.startswith("g_proj.") else name] = tensor
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_gated_layers_by_names_and_numbers(family):
    prefix, part, settings, ours = FAMILIES[family]
    modeling = modeling_of(family)
    config = getattr(transformers, f"{prefix}{part}Config")(**SIZES | settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    heads = [HEADS] if family == "laguna" else []
    layer = getattr(modeling, f"{prefix}Attention")(config, 0, *heads).eval()
    randomise(layer)
    rotary = getattr(modeling, f"{prefix}{part}RotaryEmbedding")(config)
    x = torch.randn(2, 9, E)
    positions, mask = positions_and_mask(x)
    kinds = ["full_attention"] if family in ("laguna", "lfm3") else []
    table = rotary(x, positions, *kinds)
    wanted, weights = layer(x, table, mask)

    eps = getattr(layer.q_norm, "eps", getattr(layer.q_norm, "variance_epsilon", None))
    norm = ours["qk_norm"] if isinstance(ours["qk_norm"], dict) else {}
    layer_of_ours = attnpack.GroupedQueryAttention(
        E, HEADS, KV_HEADS, head_dim=DIM, causal=True, rope=rope_of(table), **ours | {"qk_norm": {"eps": eps} | norm}
    ).eval()
    layer_of_ours.load_state_dict(our_names(layer.state_dict()), strict=True)
    for each in (layer_of_ours, layer_of_ours.cpp()):
        out, own_weights = each.forward(x, need_weights=True)
        assert_close(out, wanted, atol=2e-5, rtol=1e-5)
        assert_close(own_weights, weights, atol=1e-5, rtol=1e-5)
    wanted.square().sum().backward()
    layer_of_ours(x).square().sum().backward()
    theirs = our_names({name: p.grad for name, p in layer.named_parameters()})
    for name, parameter in layer_of_ours.named_parameters():
        assert_close(parameter.grad, theirs[name], atol=2e-4, rtol=1e-4)


def rope_of(table):
    """The rotation of a table of cosines and sines [B, L, r] with two equal halves."""
    cos, sin = (part[0, 1, : part.size(-1) // 2].double() for part in table)
    angles = torch.atan2(sin, cos)  # of position 1: base^(-2 i / r)
    base = float(angles[1] ** -len(angles)) if len(angles) > 1 else 1.0
    return attnpack.RotaryEmbedding(2 * len(angles), base=base)


def gemma_layer(index, **settings):
    config = transformers.Gemma4TextConfig(
        **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
        num_hidden_layers=4, global_head_dim=DIM, num_global_key_value_heads=KV_HEADS,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64, **settings,
    )  # fmt: skip
    config._attn_implementation = "eager"
    modeling = modeling_of("gemma4")
    torch.manual_seed(index)
    layer = modeling.Gemma4TextAttention(config, index).eval()
    randomise(layer)
    return layer, modeling.Gemma4TextRotaryEmbedding(config)


def as_gemma(layer, table, **settings):
    """Our layer with the parameters of a layer of Gemma 4."""
    norm = {"eps": layer.q_norm.eps, "values": True}
    return attnpack.GroupedQueryAttention(
        E, HEADS, KV_HEADS, head_dim=DIM, causal=True, scale=1.0, qk_norm=norm, rope=rope_of(table), **settings
    ).eval()


@pytest.mark.parametrize("index, keys_as_values", [(0, False), (1, True)], ids=["sliding", "keys as values"])
def test_gemma_4_by_names_and_numbers(index, keys_as_values):
    layer, rotary = gemma_layer(index, attention_k_eq_v=True, rope_parameters=GEMMA_ROPE)
    assert (layer.v_proj is None) == keys_as_values
    x = torch.randn(2, 9, E)
    positions, mask = positions_and_mask(x)
    table = rotary(x, positions, layer.layer_type)
    wanted, weights = layer(x, table, mask, {})
    ours = as_gemma(layer, table, keys_as_values=keys_as_values)
    ours.load_state_dict(layer.state_dict(), strict=True)
    for each in (ours, ours.cpp()):
        out, own_weights = each.forward(x, need_weights=True)
        assert_close(out, wanted, atol=2e-5, rtol=1e-5)
        assert_close(own_weights, weights, atol=1e-5, rtol=1e-5)
    wanted.square().sum().backward()
    ours(x).square().sum().backward()
    theirs = dict(layer.named_parameters())
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, theirs[name].grad, atol=2e-4, rtol=1e-4)


GEMMA_ROPE = {
    kind: {"rope_theta": base, "rope_type": "default"}
    for kind, base in (("sliding_attention", 10000.0), ("full_attention", 5000.0))
}


@torch.no_grad()
def test_a_layer_of_gemma_4_reads_the_keys_of_another():
    settings = {"num_kv_shared_layers": 2, "rope_parameters": GEMMA_ROPE}
    owner, rotary = gemma_layer(1, **settings)
    reader, _ = gemma_layer(3, **settings)
    assert owner.store_full_length_kv and reader.is_kv_shared_layer
    x = torch.randn(2, 9, E)
    hf, cache = HfCache(), attnpack.DynamicCache()
    table = rotary(x, positions_and_mask(x)[0], owner.layer_type)
    ours, our_reader = as_gemma(owner, table), as_gemma(reader, table)
    ours.load_state_dict(owner.state_dict(), strict=True)
    missing, unexpected = our_reader.load_state_dict(reader.state_dict(), strict=False)
    assert set(missing) == {"k_proj.weight", "v_proj.weight", "k_norm.weight"} and not unexpected
    past = 0
    for part in x.split([4, 1, 4], 1):
        positions, mask = positions_and_mask(part, past)
        shared = {}
        table = rotary(part, positions, owner.layer_type)
        owner(part, table, mask, shared, past_key_values=hf)
        wanted, _ = reader(part, table, mask, shared, past_key_values=hf)
        ours(part, cache=cache)
        assert_close(our_reader(part, kv_from=cache), wanted, atol=2e-5, rtol=1e-5)
        past += part.size(1)


class BlockIndexer(torch.nn.Module):
    """MiniMax-M3's indexer, by our parts: a head for each kv head, and one head of keys for all of them."""

    def __init__(self, heads, dim, rope, eps):
        super().__init__()
        self.heads, self.rope = heads, rope
        self.q_proj, self.k_proj = (torch.nn.Linear(E, width, bias=False) for width in (heads * dim, dim))
        self.q_norm, self.k_norm = (attnpack.RMSNorm(dim, eps=eps, plus_one=True) for _ in range(2))

    def forward(self, x, past, **choice):
        """Blocks of the keys of x, and of the past ones, [B, kv heads, L, n]; and all keys."""
        place = past.size(2) + torch.arange(x.size(1))
        query = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        key = self.k_norm(self.k_proj(x)).unsqueeze(1)
        query, key = (self.rope(each, place) for each in (query, key))
        key = torch.cat([past, key], 2)
        offsets = torch.full((x.size(0),), past.size(2))
        wide = key.expand(-1, self.heads, -1, -1)
        return select_blocks(query, wide, scorer="max", causal=True, q_offsets=offsets, **choice), key


@torch.no_grad()
@pytest.mark.parametrize("split", [[11], [7, 1, 3]], ids=["whole", "steps"])
def test_minimax_m3_by_names_and_numbers(split):
    """Its layer is grouped attention over the blocks that its indexer names."""
    modeling = modeling_of("minimax_m3_vl")
    kinds = {"layer_types": ["minimax_m3_sparse"] * 2, "rope_parameters": ROPE["rope_parameters"]}
    config = modeling.MiniMaxM3VLTextConfig(
        **SIZES | kinds, index_n_heads=KV_HEADS, index_head_dim=DIM, index_block_size=2, index_topk_blocks=3,
        index_local_blocks=1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = modeling.MiniMaxM3VLAttention(config, 0).eval()
    randomise(layer)
    rotary = modeling.MiniMaxM3VLRotaryEmbedding(config)
    x = torch.randn(2, sum(split), E)
    rope = rope_of(rotary(x, positions_and_mask(x)[0]))
    eps = layer.q_norm.eps
    norm = {"eps": eps, "plus_one": True}
    ours = attnpack.GroupedQueryAttention(E, HEADS, KV_HEADS, head_dim=DIM, causal=True, rope=rope, qk_norm=norm).eval()
    ours.indexer = BlockIndexer(KV_HEADS, DIM, rope, eps)
    ours.load_state_dict(layer.state_dict(), strict=True)
    hf, cache, past = HfCache(config=config), attnpack.DynamicCache(), torch.empty(2, 1, 0, DIM)
    for part in x.split(split, 1):
        positions, mask = positions_and_mask(part, len(cache))
        settings = {"past_key_values": hf, "position_ids": positions}
        wanted, weights = layer(part, rotary(part, positions), mask, **settings)
        assert (weights == 0).sum() > (mask < 0).sum() * HEADS  # some blocks are left out
        blocks, past = ours.indexer(part, past, block=2, top_blocks=3, local_blocks=1)
        out = ours(part, key_index=blocks, key_block=2, cache=cache)
        assert_close(out, wanted, atol=2e-5, rtol=1e-5)
