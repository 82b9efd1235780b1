"""Packed sequences under attn_implementation="attnpack": each gives the same as alone."""

import functools

import attnpack
import attnpack.hf
import pytest
import torch
import transformers
from attnpack.hf import attention_function, masks
from hf_families import inputs, make_model, padding

attnpack.hf.register()

FP32 = {"rtol": 1e-4, "atol": 2e-5}
ENDS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)  # the sequence in the middle is empty
PACKED = {
    "lengths": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 9, "max_length_k": 9},
    "one of them": {"cu_seq_lens_k": ENDS.long()},
    "index": {"seq_idx": torch.tensor([[3] * 5 + [1] * 9], dtype=torch.int32)},
}
POSITIONS = {"position_ids": torch.tensor([[*range(5), *range(9)]])}


@functools.cache
def model_of(family, replaced):
    model = make_model(family)
    if replaced:
        attnpack.hf.replace_attention(model)
    model.set_attn_implementation("attnpack")
    return model


@pytest.fixture(
    scope="module",
    # Windows with a cache of the same length, soft caps, sinks, latents.
    params=[("mistral", False), ("gemma2", False), ("gpt_oss", False), ("deepseek_v3", False),
            ("mistral", True), ("qwen3", True), ("deepseek_v3", True)],
    ids=lambda case: case[0] + " replaced" * case[1],
)  # fmt: skip
def case(request):
    """(model, a row of two sequences, the logits of each alone)."""
    model = model_of(*request.param)
    ids = inputs("llama", padding("none", batch=1))["input_ids"]
    with torch.no_grad():
        alone = [model(part, use_cache=False).logits for part in ids.split([5, 9], dim=1)]
    return model, ids, torch.cat(alone, dim=1)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("positions", [{}, POSITIONS], ids=["no position_ids", "position_ids"])
@pytest.mark.parametrize("packed", PACKED)
def test_sequences_do_not_see_each_other(case, packed, positions, use_cache):
    model, ids, alone = case
    with torch.no_grad():
        found = model(ids, use_cache=use_cache, **positions, **PACKED[packed]).logits
    torch.testing.assert_close(found, alone, **FP32)


# transformers' sdpa reads only position_ids, and takes no soft cap.
@pytest.mark.parametrize(
    "said, family, implementation",
    [
        (said, family, "attnpack")
        for said in ("position_ids", "both", *PACKED)
        for family in ("mistral", "gemma2", "llama")
    ]
    + [("position_ids", family, "sdpa") for family in ("mistral", "qwen3", "llama")],
)
def test_packed_sequences_build_no_mask(said, family, implementation, monkeypatch):
    """No tensor of L x L: the sequences run through attention_varlen, with windows, soft caps and gradients."""
    model = make_model(family)
    ids = inputs("llama", padding("none", batch=1))["input_ids"]
    attnpack.hf.register(replace_sdpa=True)
    try:
        model.set_attn_implementation(implementation)
        parts = [model(part, use_cache=False).logits for part in ids.split([5, 9], dim=1)]
        calls = []
        original = attention_function.attention_varlen
        monkeypatch.setattr(
            attention_function, "attention_varlen", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
        )
        monkeypatch.setattr(attention_function, "same_sequence", None)
        monkeypatch.setattr(masks.LazyMask, "materialise", None)
        both = POSITIONS | PACKED["lengths"]  # as DataCollatorWithFlattening gives them
        given = {"position_ids": POSITIONS, "both": both}.get(said) or PACKED[said]
        found = model(ids, use_cache=False, **given).logits
    finally:
        attnpack.hf.unregister()
        attnpack.hf.register()
    assert len(calls) == model.config.num_hidden_layers
    torch.testing.assert_close(found, torch.cat(parts, dim=1), **FP32)
    alone = torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), list(model.parameters()))
    for a, b in zip(torch.autograd.grad(found.square().sum(), list(model.parameters())), alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_sequence_in_two_pieces_is_one_sequence():
    index = torch.tensor([[1, 1, 2, 2, 1]])
    q = torch.randn(1, 4, 5, 8)
    found, _ = attend_with(q, seq_idx=index)
    allowed = (index[:, :, None] == index[:, None, :]) & torch.ones(5, 5, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=allowed).transpose(1, 2)
    torch.testing.assert_close(found, expected, **FP32)


def attend_with(x, **packed):
    return attnpack.hf.attention_forward(torch.nn.Module(), x, x, x, None, **packed)


def test_position_ids_alone_say_it_where_no_cache_is_made():
    """transformers reads position_ids in this way; some models (gpt-oss) make masks without them."""
    model, ids = model_of("mistral", False), inputs("llama", padding("none", batch=1))["input_ids"]
    with torch.no_grad():
        alone = [model(part, use_cache=False).logits for part in ids.split([5, 9], dim=1)]
        found = model(ids, use_cache=False, **POSITIONS).logits
    torch.testing.assert_close(found, torch.cat(alone, dim=1), **FP32)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("replaced", [False, True], ids=["theirs", "replaced"])
def test_compiled(packed, replaced):
    model, ids = model_of("qwen3", replaced), inputs("llama", padding("none", batch=1))["input_ids"]
    with torch.no_grad():
        expected = model(ids, **PACKED[packed]).logits
        found = torch.compile(model, fullgraph=True, backend="eager")(ids, **PACKED[packed]).logits
    torch.testing.assert_close(found, expected, **FP32)


def test_a_collator_of_transformers_packs_like_this():
    """The packed batch gives the mean loss of the single sequences, weighted by their predicted tokens."""
    model = model_of("qwen3", False)
    ids = inputs("llama", padding("none", batch=1))["input_ids"]
    parts = ids.split([5, 9], dim=1)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": part[0].tolist()} for part in parts])
    with torch.no_grad():
        losses = [model(part, labels=part).loss * (part.size(1) - 1) for part in parts]
        torch.testing.assert_close(model(**batch).loss, sum(losses) / 12, rtol=1e-4, atol=1e-5)


def attend(rows=1, q_len=3, kv_len=3, **packed):
    query, key = torch.zeros(rows, 4, q_len, 8), torch.zeros(rows, 2, kv_len, 8)
    return attnpack.hf.attention_forward(torch.nn.Module(), query, key, key, None, **packed)


@pytest.mark.parametrize(
    "sizes, packed, message",
    [
        ({"kv_len": 5}, {"cu_seq_lens_q": [0, 3]}, "cu_seq_lens_q: got 3 queries and 5 keys, wants as many keys"),
        ({"kv_len": 5}, {"seq_idx": [[0, 0, 1]]}, "seq_idx: got 3 queries and 5 keys"),
        ({"rows": 2}, {"cu_seq_lens_q": [0, 3]}, "cu_seq_lens_q: got a batch of 2 rows, wants one"),
        ({}, {"cu_seq_lens_q": [1, 3]}, r"cu_seq_lens_q is \[1, 3\], wants numbers from 0 to 3 that never fall"),
        ({}, {"cu_seq_lens_q": [0, 2]}, "cu_seq_lens_q is .* from 0 to 3"),
        ({}, {"cu_seq_lens_k": [0, 2, 1, 3]}, "cu_seq_lens_k is .* never fall"),
        ({}, {"cu_seq_lens_q": [[0, 3]]}, r"cu_seq_lens_q has shape \[1, 2\]"),
        ({}, {"cu_seq_lens_q": [0.0, 3.0]}, "cu_seq_lens_q has .* dtype torch.float32, wants int32 or int64"),
        ({}, {"cu_seq_lens_q": [0]}, r"cu_seq_lens_q has shape \[1\]"),
        ({}, {"cu_seq_lens_q": [0, 3], "cu_seq_lens_k": [0, 1, 3]}, "cu_seq_lens_k is .* as cu_seq_lens_q"),
        ({}, {"seq_idx": [0, 0, 1]}, r"seq_idx has shape \[3\], wants \[1, 3\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(sizes, packed, message):
    with pytest.raises(ValueError, match=f"attnpack: {message}"):
        attend(**sizes, **{name: torch.tensor(value) for name, value in packed.items()})


@pytest.mark.parametrize("replaced", [False, True], ids=["theirs", "replaced"])
@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"])
def test_a_list_in_a_tensors_place_is_named(name, replaced):
    ids = torch.arange(10).view(1, 10)
    with pytest.raises(TypeError, match=rf"attnpack: {name} is .*\(list\), wants an int32 or int64 tensor \["):
        model_of("mistral", replaced)(ids, **{name: [0, 4, 10]})


def test_keys_that_a_model_selected_are_refused():
    """DeepSeek-V3.2 selects among the keys of all sequences."""
    model = model_of("deepseek_v32", False)
    ids = inputs("llama", padding("none", batch=1))["input_ids"]
    with pytest.raises(ValueError, match="indices: got keys that the model selected .*pass position_ids"):
        model(ids, cu_seq_lens_q=ENDS)


def test_a_cache_that_holds_tokens_is_refused():
    model, ids = model_of("mistral", False), inputs("llama", padding("none", batch=1))["input_ids"]
    cache = model(ids, **PACKED["lengths"]).past_key_values
    with pytest.raises(ValueError, match="cu_seq_lens_q: got 14 queries and .* without a static cache or one that"):
        model(ids, past_key_values=cache, **PACKED["lengths"])
