"""The loss of an indexer from the probabilities at only the named keys: against all keys, in memory, its errors."""

import attnpack
import pytest
import torch
from attnpack import attention_scores, reference
from attnpack.ops import indexer_loss
from marks import long
from processes import run_python
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.testing import assert_close

BATCH, HEADS, DIM, ROPE = 2, 3, 8, attnpack.RotaryEmbedding(6).settings


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def names(length, n, kind=torch.int64):
    """[B, 1, L, n]: keys, some of them twice or more, and -1 between them; the second row names none."""
    index = torch.randint(-1, length, (BATCH, 1, length, n), generator=torch.Generator().manual_seed(n))
    index[..., ::3] = index[..., :1].clone()
    index[:, :, 1] = -1
    return index.to(kind)


def masks(length):
    rows, document = torch.arange(length).view(-1, 1), torch.arange(length) // 5
    by_head = torch.rand(BATCH, 4, length, length, generator=torch.Generator().manual_seed(0)) < 0.8
    return {
        "none": None,
        "bool": document == document.view(-1, 1),
        "rows": (rows != 3) & (torch.arange(length) > 1),
        "keys": (torch.arange(length) % 4 > 0).view(1, 1, 1, -1),
        "float": draw(BATCH, 1, length, length).masked_fill(by_head[:, :1].logical_not(), -torch.inf),
        "heads": by_head,
    }


PLACES = {
    "all": {},
    "causal": {"causal": True},
    "padded": {"causal": True, "kv_lens": torch.tensor([9, 4])},
    "rope": {"causal": True, "rope": ROPE},
    "positions": {
        "rope": ROPE,
        "positions": torch.arange(9).flip(0),
        "kv_lens": torch.tensor([9, 7], dtype=torch.int32),
    },
}


def tokens(length, dtype=torch.float64):
    shapes = (BATCH, HEADS, length, DIM), (BATCH, 1, length, DIM), (BATCH, length, HEADS)
    return [draw(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def probabilities(length, index, mask, place, **settings):
    """Those of some attention of 4 heads over the named keys."""
    rules = {name: value for name, value in place.items() if name in ("causal", "kv_lens")}
    return attention_scores(
        draw(BATCH, 4, length, 6), draw(BATCH, 2, length, 6), mask, key_index=index, **rules, **settings
    )


def check_equal(own, probs, all_probs, index, **place):
    """The same loss and gradients by the probabilities at the names as by those of all keys."""
    found = indexer_loss(*own, probs, index, at_names=True, **place)
    wanted = indexer_loss(*own, all_probs, index, **place)
    assert found > 0
    assert_close(found, wanted, atol=1e-13, rtol=1e-13)
    for ours, theirs in zip(torch.autograd.grad(found, own), torch.autograd.grad(wanted, own), strict=True):
        assert theirs.abs().max() > 1e-6
        assert_close(ours, theirs, atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("mask", masks(9))
@pytest.mark.parametrize("place", PLACES)
def test_numbers_are_those_of_the_dense_form(place, mask, kind):
    index, place = names(9, 7, kind), PLACES[place] | {"mask": masks(9)[mask]}
    dense = probabilities(9, index, place["mask"], place)
    named = probabilities(9, index, place["mask"], place, stage="named")
    check_equal(tokens(9), named, dense, index, **place)
    # A name that stands twice may have its number at both places.
    check_equal(tokens(9), dense.gather(3, index.long().clamp(min=0).expand(-1, 4, -1, -1)), dense, index, **place)


@pytest.mark.parametrize("n", [1, 9, 14])
def test_few_and_many_names(n):
    """As many as keys, too: the shape alone would not tell both forms apart."""
    index = names(9, n)
    index[:, :, 0, 0] = 3
    dense = probabilities(9, index, None, {})
    named = probabilities(9, index, None, {}, stage="named")
    found = indexer_loss(*tokens(9), named, index, at_names=True)
    assert_close(found, indexer_loss(*tokens(9), dense, index), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("mask", ["none", "bool", "keys", "heads"])
def test_many_rows_are_taken_in_pieces(mask):
    """The products of 500 rows would take 6 MB, so they are made in pieces; and so would those of attention."""
    index, place = names(500, 20), {"causal": True, "mask": masks(500)[mask], "kv_lens": torch.tensor([500, 333])}
    dense = probabilities(500, index, place["mask"], place)
    named = probabilities(500, index, place["mask"], place, stage="named")
    check_equal(tokens(500), named, dense, index, **place)


def test_the_loss_by_its_formula():
    """Against plain PyTorch, with a key of its own for each query."""
    index = torch.cat([torch.arange(9).view(1, 1, -1, 1).expand(BATCH, -1, -1, -1), names(9, 5)], -1)
    named = torch.zeros(BATCH, 9, 10, dtype=torch.bool).scatter(2, index[:, 0] % 10, True)[..., :9]
    allowed = named & torch.ones(9, 9, dtype=torch.bool).tril()
    query, key = draw(BATCH, 4, 9, 6), draw(BATCH, 2, 9, 6)
    own = tokens(9)
    scores = reference.index_scores(*own) / (HEADS * DIM) ** 0.5
    wanted = reference.indexer_loss(scores, reference.attention_scores(query, key, allowed.unsqueeze(1)), allowed)
    probs = attention_scores(query, key, key_index=index, causal=True, stage="named")
    found = indexer_loss(*own, probs, index, causal=True, at_names=True)
    assert_close(found, wanted, atol=1e-13, rtol=1e-13)
    for ours, theirs in zip(torch.autograd.grad(found, own), torch.autograd.grad(wanted, own), strict=True):
        assert_close(ours, theirs, atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize("at_names", [False, True])
def test_probabilities_of_nan_make_the_loss_nan(at_names):
    """Else training would go on without a word."""
    index = names(9, 7)
    stage = "named" if at_names else "probs"
    probs = probabilities(9, index, None, {"causal": True, "kv_lens": torch.tensor([9, 4])}, stage=stage)
    broken = probs.clone()
    broken[1, 0, 8] = torch.nan  # of padding
    rest = {"causal": True, "kv_lens": torch.tensor([9, 4]), "at_names": at_names}
    assert_close(indexer_loss(*tokens(9), broken, index, **rest), indexer_loss(*tokens(9), probs, index, **rest))
    broken[1, 0, 3] = torch.nan
    assert indexer_loss(*tokens(9), broken, index, **rest).isnan()


def test_the_second_derivative():
    index = names(9, 7)
    probs = probabilities(9, index, None, {"causal": True}, stage="named")
    own = [x.detach().requires_grad_() for x in tokens(9)]
    call = lambda *own: indexer_loss(*own, probs, index, causal=True, at_names=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, own)
    assert torch.autograd.gradgradcheck(call, own, fast_mode=True)


@pytest.mark.parametrize("at_names", [False, True])
def test_the_tools_of_torch(at_names):
    index, own = names(9, 7), tokens(9)
    place = {"causal": True, "kv_lens": torch.tensor([9, 4])}
    probs = probabilities(9, index, None, place, stage="named" if at_names else "probs")
    opcheck(torch.ops.attnpack.indexer_loss.default, (*own, probs, index), place | {"at_names": at_names})
    loss = lambda *own: indexer_loss(*own, probs, index, at_names=at_names)  # noqa: E731
    several = [torch.stack([x, 2 * x]) for x in own]
    assert_close(torch.vmap(loss)(*several), torch.stack([loss(*each) for each in zip(*several, strict=True)]))


def test_a_graph_has_no_pieces():
    """The steps for 500 rows, which a plain call takes in pieces, are as many as those for 9."""

    def trace(length):
        query, key, index = draw(BATCH, 4, length, 6), draw(BATCH, 2, length, 6), names(length, 7)

        def call(*own):
            probs = attention_scores(query, key, key_index=index, causal=True, stage="named")
            return indexer_loss(*own, probs, index, causal=True, at_names=True)

        own = [x.detach() for x in tokens(length)]
        graph = make_fx(call)(*own)
        assert_close(graph(*own), call(*own), atol=1e-13, rtol=1e-13)
        return len(graph.graph.nodes)

    assert trace(500) == trace(9) > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_other_dtypes_and_autocast(dtype):
    index, own = names(9, 7), tokens(9, dtype)
    dense, named = (probabilities(9, index, None, {}, stage=stage).to(dtype) for stage in ("probs", "named"))
    found = indexer_loss(*own, named, index, at_names=True)
    assert found.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(indexer_loss(*own, named, index, at_names=True), found, atol=1e-6, rtol=1e-6)
    assert_close(found, indexer_loss(*own, dense, index), atol=1e-6, rtol=1e-6)


def peak_of_training(made, step):
    """By how many KiB a step with 4,096 tokens raises a process's peak memory over that of a step with 256."""
    code = f"""
import resource, torch, attnpack
from attnpack.ops import indexer_loss
torch.set_num_threads(2)
def peak(length):
    {made}
    {step}.backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = peak(256)
print(peak(4096) - small)
"""
    process = run_python(code)
    assert process.returncode == 0, process.text
    return int(process.stdout)


TRAINED = {
    "loss": (
        "own = [torch.randn(1, n, length, 16, requires_grad=True) for n in (8, 1)]; "
        "own += [torch.randn(1, length, 8, requires_grad=True)]; "
        "index = torch.randint(length, (1, 1, length, 64)); probs = torch.rand(1, 8, length, 64)",
        "indexer_loss(*own, probs, index, causal=True, at_names=True)",
    ),
    "grouped": (
        "layer = attnpack.SparseAttention(64, 8, 2, top_k=64, causal=True); x = torch.randn(1, length, 64)",
        "layer{}.indexer_loss(x, sparse=True)",
    ),
    "latent": (
        "layer = attnpack.SparseLatentAttention(64, 8, top_k=64, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, "
        "qk_rope_head_dim=4, v_head_dim=8, causal=True); x = torch.randn(1, length, 64)",
        "layer{}.indexer_loss(x, sparse=True)",
    ),
}


# Both languages run one operator.
@pytest.mark.parametrize(("kind", "language"), [*((kind, "") for kind in TRAINED), long("latent", ".cpp()")])
def test_training_holds_no_matrix_of_all_pairs(kind, language):
    """One matrix of 4,096 x 4,096 numbers takes 64 MiB, and each of 8 heads has one."""
    made, step = TRAINED[kind]
    assert peak_of_training(made, step.format(language)) < 120 * 1024


def good(**others):
    own = dict(zip(("query", "key", "weights"), (draw(1, 2, 4, 3), draw(1, 1, 4, 3), draw(1, 4, 2)), strict=True))
    index, probs = torch.zeros(1, 1, 4, 3, dtype=torch.int64), torch.rand(1, 2, 4, 3)
    return own | {"probabilities": probs, "key_index": index, "at_names": True} | others


WRONG = {
    r"probabilities has shape \[1, 2, 4, 3\] .*, 4, 4\], one for each key \(.* want at_names=True\)": {
        "at_names": False
    },
    r"probabilities has shape \[1, 2, 4, 4\] .*, 4, 3\], one for each name of key_index": {
        "probabilities": torch.rand(1, 2, 4, 4)
    },
    "at_names: got True without key_index, whose names it means; give key_index": {"key_index": None},
    r"key_index\[0, 0, 2, 1\] is 4, wants 0 to 3, the keys of a sequence of 4, or -1 for none": {
        "key_index": torch.tensor([[[[0, 0, 0], [0, 0, 0], [0, 4, 0], [0, 0, 0]]]])
    },
    r"key_index\[0, 0, 0, 0\] is -2, wants 0 to 3": {"key_index": torch.full((1, 1, 4, 3), -2)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    assert indexer_loss(**good()).isfinite()
    with pytest.raises(ValueError, match=message):
        indexer_loss(**good(**WRONG[message]))


@pytest.mark.parametrize("call", ["attend", "latent_attend"])
def test_at_names_of_a_layer_wants_names_and_weights(call):
    q, k, v = draw(1, 2, 4, 6), draw(1, 4, 4), draw(1, 4, 2)
    arguments = (q, k, v, None, 4, "auto") if call == "latent_attend" else (q, q, q)
    attend = getattr(attnpack.ops, call)
    with pytest.raises(ValueError, match="at_names: got True without key_index"):
        attend(*arguments, need_weights=True, at_names=True)
    index = torch.zeros(1, 1, 4, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="at_names: got True without need_weights"):
        attend(*arguments, key_index=index, at_names=True)
    _, probs = attend(*arguments, key_index=index, need_weights=True, at_names=True)
    assert_close(probs, torch.eye(3, dtype=torch.float64)[0].expand(1, 2, 4, 3))


@pytest.mark.parametrize(
    "name", ["query", "key", "weights", "probabilities", "key_index", "mask", "kv_lens", "positions"]
)
def test_sparse_tensors_are_refused_by_name(name):
    """torch itself would stop with an internal assertion."""
    given = good(mask=torch.ones(1, 1, 4, 4, dtype=torch.bool), kv_lens=torch.tensor([4]), positions=torch.arange(4))
    tensor = given[name]
    for layout in [tensor.to_sparse(), *([tensor.to_sparse_csr()] if tensor.dim() > 1 else [])]:
        with pytest.raises(ValueError, match=f"{name} has the layout Sparse.*call .to_dense"):
            indexer_loss(**given | {name: layout})
