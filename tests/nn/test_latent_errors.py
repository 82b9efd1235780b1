"""Language models of latent attention, and wrong arguments of both: what the message names, in both languages."""

import attnpack
import pytest
import torch
from latent_cases import HEADS, PATHS, SIZES, E, make

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}


@pytest.mark.parametrize("latent", [LATENT, LATENT | {"qk_rope_head_dim": 0, "latent_norm": False}])
@torch.no_grad()
def test_a_language_model_of_latent_attention(latent):
    torch.manual_seed(0)
    model = attnpack.CausalLM(60, E, 2, HEADS, hidden_dim=64, rope_interleaved=True, latent=latent).eval()
    ids, twin = torch.randint(60, (2, 9)), model.cpp()
    assert torch.equal(model(ids), twin.forward(ids))
    tokens = model.generate(ids, max_new_tokens=6)
    for cache in ("static", "none", attnpack.ModelCache([attnpack.LatentCache() for _ in range(2)])):
        assert torch.equal(model.generate(ids, max_new_tokens=6, cache=cache), tokens)
    assert cache.nbytes == 2 * 2 * 14 * (16 + latent["qk_rope_head_dim"]) * 4
    lengths = torch.tensor([5, 9])
    ragged = model.generate(ids, max_new_tokens=4, lengths=lengths)
    assert torch.equal(ragged[0, 9:], model.generate(ids[:1, :5], max_new_tokens=4)[0, 5:])
    copied = twin.clone()
    assert torch.equal(copied.generate(ids, max_new_tokens=6), tokens)


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_bad_models_of_latent_attention_are_named(module):
    for name, value in (
        ("head_dim", 8),
        ("qk_norm", True),
        ("window", (3, 0)),
        ("num_kv_heads", 2),
        ("out_bias", True),
    ):
        with pytest.raises(ValueError, match=f"{name}: got one together with latent"):
            module.CausalLM(60, E, 2, HEADS, latent=LATENT, **{name: value})
    with pytest.raises(ValueError, match="latent: got 'rank', want keywords of MultiHeadLatentAttention"):
        module.CausalLM(60, E, 2, HEADS, latent={"rank": 3})
    with pytest.raises(ValueError, match="v_head_dim: got none, MultiHeadLatentAttention needs it"):
        module.CausalLM(60, E, 2, HEADS, latent={k: v for k, v in LATENT.items() if k != "v_head_dim"})
    with pytest.raises(TypeError, match="latent is 3 .*, wants None or a dict such as"):
        module.CausalLM(60, E, 2, HEADS, latent=3)
    with pytest.raises(TypeError, match="latent: v_head_dim is 2.5 .*, wants an int"):
        module.CausalLM(60, E, 2, HEADS, latent=LATENT | {"v_head_dim": 2.5})


# ---- wrong arguments ---------------------------------------------------------------------

BAD = {
    "kv_lora_rank: got 0, want at least 1": {"kv_lora_rank": 0},
    "q_lora_rank: got -1, want at least 1": {"q_lora_rank": -1},
    "qk_nope_head_dim: got 0, want at least 1": {"qk_nope_head_dim": 0},
    "qk_rope_head_dim: got -2, want 0 or more": {"qk_rope_head_dim": -2},
    "v_head_dim: got 0, want at least 1": {"v_head_dim": 0},
    "dropout: got 1, want 0 <= dropout < 1": {"dropout": 1.0},
    "path: got 'fast', want 'auto', 'expanded' or 'absorbed'": {"path": "fast"},
    "scale: got nan": {"scale": float("nan")},
}


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("message", BAD)
def test_bad_settings_are_named(module, message):
    with pytest.raises(ValueError, match=f"attnpack: {message}"):
        module.MultiHeadLatentAttention(E, HEADS, **{**SIZES, **BAD[message]})
    with pytest.raises(ValueError, match="rope: got dim 10, want at most qk_rope_head_dim 8"):
        module.MultiHeadLatentAttention(E, HEADS, **SIZES, rope=module.RotaryEmbedding(10))
    with pytest.raises(TypeError):
        module.MultiHeadLatentAttention(E, HEADS, **{k: v for k, v in SIZES.items() if k != "v_head_dim"})


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_a_layer_without_rope_says_that_nothing_is_rotated(module):
    def text(**settings):
        return repr(module.MultiHeadLatentAttention(E, HEADS, **SIZES | settings))

    assert "no dim is rotated" in text()
    assert "no dim is rotated" not in text(rope=module.RotaryEmbedding(8))
    assert "no dim is rotated" not in text(qk_rope_head_dim=0)


SET_LATER = {"window": (3, 0), "softcap": 5.0, "alibi": True, "head_map": (0, 0, 1, 1)}


@pytest.mark.parametrize("name", SET_LATER)
def test_settings_that_latent_attention_does_not_have(name):
    module = make()
    setattr(module, name, SET_LATER[name])
    for call in (module, module.project):
        with pytest.raises(ValueError, match=f"attnpack: {name} is .*, a setting that latent attention does not have"):
            call(torch.randn(1, 3, E))


CALLS = {
    r"x: got shape \[3, 48\]": lambda call, cache: call(torch.zeros(3, E)),
    r"context: got shape \[1, 3, 7\]": lambda call, cache: call(torch.zeros(1, 3, E), torch.zeros(1, 3, 7)),
    "x: got dtype .*, want the module's dtype": lambda call, cache: call(torch.zeros(1, 3, E, dtype=torch.float64)),
    "value_context: got a tensor, but latent attention": lambda call, cache: call(
        torch.zeros(1, 3, E), torch.zeros(1, 3, E), value_context=torch.zeros(1, 3, E)
    ),
    "cache: got one together with context": lambda call, cache: call(
        torch.zeros(1, 3, E), torch.zeros(1, 3, E), cache=cache
    ),
    "mask": lambda call, cache: call(torch.zeros(1, 3, E), mask=torch.ones(5, 7, dtype=torch.bool), cache=cache),
    r"positions has shape \[2\]": lambda call, cache: call(
        torch.zeros(1, 3, E), positions=torch.arange(2), cache=cache
    ),
    r"kv_lens\[0\] is 4": lambda call, cache: call(torch.zeros(1, 3, E), kv_lens=torch.tensor([4]), cache=cache),
    r"cache: got keys of shape \[2, 1, 3, 24\], want \[1, 1, L, 24\]": lambda call, cache: call(
        torch.zeros(2, 3, E), cache=cache
    ),
}


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("message", CALLS)
@pytest.mark.parametrize("path", PATHS)
def test_bad_inputs_leave_the_cache_as_it_was(module, message, path):
    ours = make(path=path)
    call = ours if module is attnpack else ours.cpp().forward
    cache = module.LatentCache()
    call(torch.randn(1, 5, E), cache=cache)
    held = cache.k.clone()
    with pytest.raises(ValueError, match=message) as error:
        CALLS[message](call, cache)
    assert "\n" not in str(error.value)
    assert len(cache) == 5 and cache.lengths.tolist() == [5] and torch.equal(cache.k, held)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": torch.ones(2, 3, 10)}, r"latents has shape \[2, 3, 10\], wants \[batch, 1, length"),
        ({"latents": torch.ones(2, 2, 3, 10)}, r"latents has shape \[2, 2, 3, 10\], wants \[batch, 1, length"),
        (
            {"kv": torch.ones(2, 4, 16)},
            r"kv has shape \[2, 4, 16\], wants \[2, 3, 2 \* \(qk_nope_head_dim \+ v_dim\)\]",
        ),
        ({"kv": torch.ones(2, 3, 15)}, r"kv has shape \[2, 3, 15\], wants \[2, 3, 2 \* "),
        ({"kv": torch.ones(3, 16)}, r"kv has shape \[3, 16\]"),
        ({"kv": torch.ones(2, 3, 16, device="meta")}, "kv is on meta, latents on cpu: move one of them"),
        ({"latent_dim": 11}, "latent_dim is 11, wants 0 to 10, the width of latents"),
        ({"latent_dim": -1}, "latent_dim is -1, wants 0 to 10"),
        ({"num_heads": 0}, "num_heads is 0, wants at least 1"),
        ({"num_heads": -2}, "num_heads is -2, wants at least 1"),
        ({"v_dim": 9}, r"kv has shape \[2, 3, 16\], .* with v_dim = 9"),
        ({"v_dim": -1}, "v_dim is -1, wants 0 or more"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_latent_expand_names_what_does_not_fit(change, message):
    good = {"latents": torch.ones(2, 1, 3, 10), "kv": torch.ones(2, 3, 16), "latent_dim": 6, "num_heads": 2, "v_dim": 5}
    torch.ops.attnpack.latent_expand(**good)
    with pytest.raises(ValueError, match=f"attnpack: {message}"):
        torch.ops.attnpack.latent_expand(**good | change)
