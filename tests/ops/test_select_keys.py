"""Which keys and blocks are chosen: by loops over the rows, and by the indexers of transformers."""

import attnpack
import pytest
import torch
from attnpack.ops import indexer_loss, select_blocks, select_keys
from torch.library import opcheck
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl, modeling_minimax_m3_vl

PLACES = [
    {},
    {"causal": True},
    {"causal": True, "q_offsets": torch.tensor([3, 0])},
    {"kv_lens": torch.tensor([5, 0])},
    {"causal": True, "q_offsets": torch.tensor([6, 1]), "kv_lens": torch.tensor([9, 4], dtype=torch.int32)},
]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def allowed(b, i, length, place):
    """The keys that row i of sequence b may attend."""
    end = int(place["kv_lens"][b]) if "kv_lens" in place else length
    past = int(place["q_offsets"][b]) if "q_offsets" in place else 0
    return range(min(end, past + i + 1) if place.get("causal") else end)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("top_k, local", [(1, 0), (3, 0), (40, 0), (1, 1), (3, 2), (4, 4)])
def test_the_best_keys(top_k, local, place):
    query, key, weights = draw(2, 3, 4, 5), draw(2, 1, 10, 5), draw(2, 4, 3)
    index = select_keys(query, key, weights, top_k, local_keys=local, **place)
    assert index.dtype == torch.int32 and index.shape == (2, 1, 4, min(top_k, 10))
    for b in range(2):
        for i in range(4):
            worth = {
                j: float(sum(weights[b, i, h] * (query[b, h, i] @ key[b, 0, j]).clamp_min(0) for h in range(3)))
                for j in allowed(b, i, 10, place)
            }
            own = i + (int(place["q_offsets"][b]) if "q_offsets" in place else 0)
            worth |= {j: float("inf") for j in range(own - local + 1, own + 1) if j in worth}
            wanted = sorted(worth, key=lambda j: -worth[j])[:top_k]
            found = index[b, 0, i].tolist()
            assert {j for j in found if j >= 0} == set(wanted) or sorted(worth[j] for j in wanted) == sorted(
                worth[j] for j in found if j >= 0
            )
            assert found.count(-1) == len(found) - len(wanted) and found[len(wanted) :] == [-1] * found.count(-1)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("scorer", ["mean", "max"])
@pytest.mark.parametrize(
    "block, top, local", [(3, 2, 1), (4, 3, 2), (1, 4, 1), (16, 2, 1), (2, 9, 0), (2, 1, 0), (4, 1, 0), (2, 2, 0)]
)
def test_the_best_blocks(block, top, local, scorer, place):
    query, key = draw(2, 4, 4, 5), draw(2, 2, 10, 5)
    if local == 0 and scorer == "mean" and place.get("causal"):
        with pytest.raises(ValueError, match="local_blocks is 0 for a causal 'mean'"):
            select_blocks(query, key, block, top, local_blocks=local, scorer=scorer, **place)
        return
    index = select_blocks(query, key, block, top, local_blocks=local, scorer=scorer, **place)
    blocks = -(-10 // block)
    assert index.dtype == torch.int32 and index.shape == (2, 2, 4, min(top, blocks))
    for b in range(2):
        end = int(place["kv_lens"][b]) if "kv_lens" in place else 10
        past = int(place["q_offsets"][b]) if "q_offsets" in place else 0
        for g in range(2):
            for i in range(4):
                seen, worth = allowed(b, i, 10, place), {}
                for n in range(blocks):
                    inside = [j for j in range(n * block, min(n * block + block, end))]
                    visible = [j for j in inside if j in seen]
                    if not visible:
                        continue
                    scored = visible if scorer == "max" else inside
                    keys = key[b, g, scored]
                    products = query[b, 2 * g : 2 * g + 2, i] @ keys.T
                    pooled = products.amax(-1) if scorer == "max" else products.mean(-1)
                    own = (past + i) // block
                    worth[n] = float("inf") if own - local < n <= own else float(pooled.sum())
                wanted = sorted(worth, key=lambda n: -worth[n])[:top]
                found = index[b, g, i].tolist()
                assert {n for n in found if n >= 0} == set(wanted)
                assert found[len(wanted) :] == [-1] * (len(found) - len(wanted))


@pytest.mark.parametrize("scorer", ["mean", "max"])
@pytest.mark.parametrize("place", [{"kv_lens": torch.tensor([3])}, {"causal": True, "q_offsets": torch.tensor([2])}])
def test_keys_that_no_query_may_attend_open_no_block(scorer, place):
    """Key 3 of the first block, which lies in padding or after the query, though the mask leaves it."""
    for left, wanted in (([3], [-1, -1]), ([1, 3], [0, -1])):
        mask = torch.zeros(8, dtype=torch.bool).index_fill(0, torch.tensor(left), True)
        index = select_blocks(draw(1, 2, 1, 3), draw(1, 1, 8, 3), 4, 2, scorer=scorer, mask=mask, **place)
        assert index.tolist() == [[[wanted]]]


def test_of_equal_scores_the_lower_numbers():
    """However many keys follow: a choice in decode is that of prefill."""
    query, key, weights = draw(1, 2, 1, 3), torch.zeros(1, 1, 40, 3).double(), draw(1, 1, 2)
    key[..., 7, :] = query[:, 0] * weights[0, 0, 0].sign()
    for length in (9, 16, 40):
        index = select_keys(query, key[:, :, :length], weights, 4)[0, 0, 0].tolist()
        assert sorted(index) in ([0, 1, 2, 3], [0, 1, 2, 7])
    blocks = select_blocks(draw(1, 2, 4, 3), torch.zeros(1, 1, 40, 3).double(), 4, 3, local_blocks=0)
    assert blocks.sort(-1).values.tolist() == [[[[0, 1, 2]] * 4]]


def test_no_gradient_and_the_tools_of_torch():
    query, key, weights = (x.requires_grad_() for x in (draw(2, 3, 4, 5), draw(2, 1, 10, 5), draw(2, 4, 3)))
    assert not select_keys(query, key, weights, 3).requires_grad
    place = (True, torch.tensor([6, 1]), torch.tensor([9, 4]))
    opcheck(torch.ops.attnpack.select_keys.default, (query, key, weights, 3, *place))
    blocks = (draw(2, 4, 4, 5).requires_grad_(), draw(2, 2, 10, 5), 3, 2, 1)
    for scorer in ("mean", "max"):
        opcheck(torch.ops.attnpack.select_blocks.default, (*blocks, scorer, *place))


REFUSED = {
    "key has 2 heads, wants one": lambda: select_keys(draw(2, 3, 4, 5), draw(2, 2, 9, 5), draw(2, 4, 3), 3),
    "weights has shape": lambda: select_keys(draw(2, 3, 4, 5), draw(2, 1, 9, 5), draw(2, 3, 4), 3),
    "top_k is 0, wants at least 1": lambda: select_keys(draw(2, 3, 4, 5), draw(2, 1, 9, 5), draw(2, 4, 3), 0),
    "key has shape": lambda: select_blocks(draw(2, 4, 4, 5), draw(2, 2, 9, 6), 3, 2),
    "key has 3 heads, wants a number that divides": lambda: select_blocks(draw(2, 4, 4, 5), draw(2, 3, 9, 5), 3, 2),
    "scorer: got 'sum', want 'mean' or 'max'": lambda: select_blocks(
        draw(2, 4, 4, 5), draw(2, 2, 9, 5), 3, 2, scorer="sum"
    ),
    "local_blocks is 3, wants 0 to 2": lambda: select_blocks(draw(2, 4, 4, 5), draw(2, 2, 9, 5), 3, 2, local_blocks=3),
    "block is 0": lambda: select_blocks(draw(2, 4, 4, 5), draw(2, 2, 9, 5), 0, 2),
    "kv_lens has shape": lambda: select_blocks(draw(2, 4, 4, 5), draw(2, 2, 9, 5), 3, 2, kv_lens=torch.tensor([1])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)


@torch.no_grad()
def test_the_lightning_indexer_of_deepseek_v32():
    config = DeepseekV32Config(
        hidden_size=32, index_n_heads=4, index_head_dim=16, qk_rope_head_dim=8, index_topk=5, q_lora_rank=12,
        num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = modeling_deepseek_v32.DeepseekV32Indexer(config, 0)
    randomise(theirs)
    x, low = torch.randn(2, 11, 32), torch.randn(2, 11, 12)
    rope = attnpack.RotaryEmbedding(8)
    cos, sin = (
        torch.cat([t, t], -1).expand(2, -1, -1) for t in attnpack.ops.rope_table(torch.arange(11), rope.inv_freq)
    )
    mask = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, -1, -1)
    wanted = theirs(x, low, (cos, sin), mask, None)
    query = rope(theirs.wq_b(low).unflatten(-1, (4, 16)).transpose(1, 2))
    key = rope(theirs.k_norm(theirs.wk(x)).unsqueeze(1))
    index = select_keys(query, key, theirs.weights_proj(x), 5, causal=True)
    for b in range(2):
        for i in range(11):
            own = {int(j) for j in index[b, 0, i] if j >= 0}
            assert own == {int(j) for j in wanted[b, i] if j <= i}


@torch.no_grad()
def test_the_block_indexer_of_minimax_m3():
    config = configuration_minimax_m3_vl.MiniMaxM3VLTextConfig(
        hidden_size=32, index_n_heads=2, index_head_dim=8, index_block_size=4, index_topk_blocks=3,
        index_local_blocks=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = modeling_minimax_m3_vl.MiniMaxM3VLIndexer(config, 0)
    randomise(theirs)
    x, rope = torch.randn(2, 23, 32), attnpack.RotaryEmbedding(8)
    cos, sin = (
        torch.cat([t, t], -1).expand(2, -1, -1) for t in attnpack.ops.rope_table(torch.arange(23), rope.inv_freq)
    )
    wanted = theirs(x, (cos, sin), None, torch.arange(23).expand(2, -1))
    query = rope(theirs.q_norm(theirs.q_proj(x).unflatten(-1, (2, 8))).transpose(1, 2))
    key = rope(theirs.k_norm(theirs.k_proj(x).unsqueeze(2)).transpose(1, 2)).expand(-1, 2, -1, -1)
    index = select_blocks(query, key, 4, 3, scorer="max", causal=True)
    assert index.shape == wanted.shape
    assert torch.equal(index.sort(-1).values, wanted.int().sort(-1).values)


def test_sparse_tensors_are_refused_by_name():
    """torch itself would stop with an internal assertion."""
    query, key, weights, probs = draw(1, 2, 4, 3), draw(1, 1, 4, 3), draw(1, 4, 2), draw(1, 2, 4, 4).softmax(-1)
    good = {"query": query, "key": key, "weights": weights, "probabilities": probs}
    for name, tensor in good.items():
        for layout in (tensor.to_sparse(), tensor.to_sparse_csr()):
            with pytest.raises(ValueError, match=f"{name} has the layout Sparse.*call .to_dense"):
                indexer_loss(**good | {name: layout})
            if name != "probabilities":
                with pytest.raises(ValueError, match=f"{name} has the layout Sparse"):
                    select_keys(*[(good | {name: layout})[part] for part in ("query", "key", "weights")], 2)
    with pytest.raises(ValueError, match="key_index has the layout Sparse"):
        indexer_loss(**good, key_index=torch.zeros(1, 1, 4, 2, dtype=torch.int64).to_sparse())
    with pytest.raises(ValueError, match="block_sums has the layout Sparse"):
        select_blocks(query, key, 2, 1, block_sums=draw(1, 1, 2, 3).to_sparse())
