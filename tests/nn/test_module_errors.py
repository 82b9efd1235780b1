"""Wrong arguments and inputs of the modules: what the message names, and that both languages say the same."""

import attnpack
import pytest
import torch

X = torch.randn(2, 5, 24)
CONSTRUCTIONS = {
    "num_heads: got 5, which does not divide embed_dim 24": lambda m: m.MultiHeadAttention(24, 5),
    "num_kv_heads: got 3, which does not divide num_heads 4": lambda m: m.GroupedQueryAttention(24, 4, 3),
    "num_heads: got 0": lambda m: m.MultiHeadAttention(24, 0),
    "head_dim: got 0": lambda m: m.MultiHeadAttention(24, 4, head_dim=0),
    "head_map: got 3 entries": lambda m: m.GroupedQueryAttention(24, 4, 2, head_map=[0, 1, 1]),
    "head_map: got kv head 2, want 0 to 1": lambda m: m.GroupedQueryAttention(24, 4, 2, head_map=[0, 1, 2, 1]),
    "rope: got dim 8, want at most head_dim 6": lambda m: m.MultiHeadAttention(24, 4, rope=m.RotaryEmbedding(8)),
    "dim: got 5, want an even number": lambda m: m.RotaryEmbedding(5),
    "scaling: got rope_type 'su', want 'default', 'linear', 'ntk'": lambda m: m.RotaryEmbedding(
        8, scaling={"rope_type": "su", "factor": 2.0}
    ),
    "'linear' needs 'factor'": lambda m: m.RotaryEmbedding(8, scaling={"type": "linear"}),
    "activation: got 'relu'": lambda m: m.FeedForward(24, 32, activation="relu"),
    "norm: got 'batch', want 'rms' or 'layer'": lambda m: m.EncoderBlock(
        m.MultiHeadAttention(24, 4), m.FeedForward(24, 32), norm="batch"
    ),
    "layers: got none": lambda m: m.Encoder([]),
    "num_layers: got 0": lambda m: m.CausalLM(10, 24, 0, 4),
    r"window: got \(-2, 0\), want how many keys": lambda m: m.MultiHeadAttention(24, 4, window=(-2, 0)),
    "softcap: got -30, want a number above 0": lambda m: m.MultiQueryAttention(24, 4, softcap=-30.0),
    "dropout: got 1, want 0 <= dropout < 1": lambda m: m.ProjectedAttention(4, 2, 6, dropout=1.0),
}


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("message", CONSTRUCTIONS)
def test_constructor_names_the_argument(module, message):
    with pytest.raises(ValueError, match=f"attnpack: .*{message}"):
        CONSTRUCTIONS[message](module)


def test_missing_required_arguments_raise():
    for module in (attnpack, attnpack.cpp):
        with pytest.raises(TypeError):
            module.GroupedQueryAttention(24, 4)
        with pytest.raises(TypeError):
            module.MultiHeadAttention(24)
        with pytest.raises(TypeError):
            module.MultiHeadAttention(24, 4, 2)


CALLS = {
    r"x: got shape \[5, 24\], want \[batch, length, 24\]": lambda m, c: m.forward(X[0]),
    r"x: got shape \[2, 5, 20\]": lambda m, c: m.forward(X[:, :, :20]),
    "x: got dtype .*, want the module's dtype": lambda m, c: m.forward(X.double()),
    "x: got device meta, want the module's device cpu": lambda m, c: m.forward(X.to("meta")),
    r"context: got shape \[2, 5, 20\]": lambda m, c: m.forward(X, X[:, :, :20]),
    "context: got batch 1, want 2": lambda m, c: m.forward(X, X[:1]),
    "value_context: got a tensor without context": lambda m, c: m.forward(X, value_context=X),
    "cache: got one together with context": lambda m, c: m.forward(X, X, cache=c.DynamicCache()),
    "mask": lambda m, c: m.forward(X, mask=torch.ones(3, 1, 5, 5, dtype=torch.bool)),
    "kv_lens": lambda m, c: m.forward(X, kv_lens=torch.tensor([-1, 5])),
    "value_context: got length 3, want 5 as context has: each of its keys needs one": lambda m, c: m.forward(
        X, X, value_context=X[:, :3]
    ),
    r"positions has shape \[4\] and dtype .*, wants int64 \[length\] or \[batch, length\] with length 5": lambda m, c: (
        m.forward(X, positions=torch.arange(4))
    ),
    r"positions has shape \[5\] and dtype .*, wants int64 \[length\]": lambda m, c: m.forward(
        X, positions=torch.arange(5.0)
    ),
    r"positions has shape \[3, 5\]": lambda m, c: m.forward(X, positions=torch.arange(5).expand(3, 5)),
    r"positions has shape \[6\]": lambda m, c: m.project(X, positions=torch.arange(6)),
    r"context: got shape \[\]": lambda m, c: m.forward(X, torch.tensor(1.0)),
    "kv_lens.*": lambda m, c: m.forward(X, kv_lens=torch.tensor([6, 5])),
}


@pytest.mark.parametrize("native", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("message", CALLS)
def test_forward_names_the_argument(native, message):
    module = attnpack.GroupedQueryAttention(24, 4, 2)
    module, caches = (module.cpp(), attnpack.cpp) if native else (module, attnpack)
    with pytest.raises(ValueError, match=message):
        CALLS[message](module, caches)


@pytest.mark.parametrize("module", [attnpack.SelfAttention(24), attnpack.MultiQueryAttention(24, 4)])
def test_notebook_keyword_is_explained(module):
    with pytest.raises(TypeError, match="kv_cache.*use cache="):
        module(X, kv_cache=attnpack.DynamicCache())
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        module(X, masks=None)


@pytest.mark.parametrize("native", [False, True], ids=["python", "cpp"])
def test_cross_attention_without_its_context_is_explained(native):
    module = attnpack.MultiHeadAttention(24, 4, kdim=10)
    with pytest.raises(ValueError, match=r"x, taken as context: got shape \[2, 5, 24\], want \[batch, length, 10\]"):
        (module.cpp() if native else module).forward(X)
    module = attnpack.MultiHeadAttention(24, 4, kdim=24, vdim=10)
    with pytest.raises(ValueError, match="x or context, taken as value_context: got shape"):
        (module.cpp() if native else module).forward(X, X)


def test_projected_attention_checks_widths():
    for module in (attnpack.ProjectedAttention(4, 2, 6), attnpack.cpp.ProjectedAttention(4, 2, 6)):
        with pytest.raises(ValueError, match=r"k: got shape \[2, 5, 24\], want \[batch, length, 12\]"):
            module.forward(X, X, X[:, :, :12])


def test_load_state_dict_checks_before_it_writes():
    twin = attnpack.cpp.MultiHeadAttention(24, 4)
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    good = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    wrong_shape = good | {"v_proj.weight": torch.zeros(3, 3)}
    missing = {name: tensor for name, tensor in good.items() if name != "o_proj.weight"}
    for wrong, message in (
        (wrong_shape, "v_proj.weight of shape"),
        (missing, "o_proj.weight"),
        (good | {"other": torch.zeros(1)}, "other"),
    ):
        for load in (twin.load_state_dict, twin.assign_state_dict):
            with pytest.raises(ValueError, match=message):
                load(wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.state_dict().items())
    assert twin.load_state_dict(missing, strict=False) == (["o_proj.weight"], [])


def test_block_needs_an_attention_module():
    with pytest.raises(TypeError, match="attention is a FeedForward, wants an attention module"):
        attnpack.cpp.DecoderBlock(attnpack.cpp.FeedForward(24, 32), attnpack.cpp.FeedForward(24, 32))
