"""Calls for a type checker, which test_types.py runs: each has the type that is named. A line "# wrong" is an error."""

from collections.abc import Callable
from typing import assert_type

import attnpack
import attnpack.distributed
import torch
from attnpack import convert, cpp, flash, ops, reference
from torch import Tensor

Pair = tuple[Tensor, Tensor]
x = torch.zeros(1)
flag = bool(x)
kept = attnpack.DynamicCache()

# ---- functions whose result depends on a flag
assert_type(attnpack.attention(x, x, x, None, causal=True, q_offset="end"), Tensor)
assert_type(attnpack.attention(x, x, x, return_lse=True, window=(1, 0)), tuple[Tensor, Tensor])
assert_type(attnpack.attention(x, x, x, return_lse=False), Tensor)
assert_type(attnpack.attention(x, x, x, return_lse=flag), Tensor | Pair)
assert_type(attnpack.attention_varlen(x, x, x, x, block_table=x), Tensor)
assert_type(attnpack.attention_varlen(x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(attnpack.attention_varlen(x, x, x, x, return_lse=flag), Tensor | Pair)
assert_type(attnpack.distributed.attention(x, x, x, method="ring"), Tensor)
assert_type(attnpack.distributed.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(reference.attention(x, x, x, causal=True), Tensor)
assert_type(reference.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(ops.attend_shared(x, x, x, x, need_weights=True), tuple[Tensor, Tensor])
assert_type(flash.flash_attn_func(x, x, x, 0.0, None, True), Tensor)
assert_type(flash.flash_attn_func(x, x, x, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
assert_type(flash.flash_attn_func(x, x, x, return_attn_probs=flag), Tensor | tuple[Tensor, Tensor, Tensor])
assert_type(flash.flash_attn_varlen_func(x, x, x, x, x, 4, 4, return_attn_probs=False), Tensor)
assert_type(flash.flash_attn_with_kvcache(x, x, x, causal=True), Tensor)
assert_type(flash.flash_attn_with_kvcache(x, x, x, return_softmax_lse=True), tuple[Tensor, Tensor])
assert_type(attnpack.attention_scores(x, x), Tensor)
assert_type(attnpack.causal_conv1d(x, x, activation="silu"), Tensor)
assert_type(attnpack.causal_conv1d(x, x, return_state=True), tuple[Tensor, Tensor])
assert_type(attnpack.causal_conv1d(x, x, return_state=flag), Tensor | Pair)
assert_type(attnpack.linear_attention(x, x, x, beta=x), Tensor)
assert_type(attnpack.linear_attention(x, x, x, return_state=True), tuple[Tensor, Tensor])
assert_type(attnpack.linear_attention(x, x, x, return_state=flag), Tensor | Pair)
assert_type(attnpack.merge_states(x, x, x, x), tuple[Tensor, Tensor])
attnpack.attention(x, x, x, casual=True)  # wrong
attnpack.attention(x, x, x, return_lse=True, softcap="2")  # wrong
attnpack.attention_varlen(x, x, x, x, q_offset=0)  # wrong
flash.flash_attn_func(x, x, x, casual=True)  # wrong

# ---- modules: `layer(x)` has the types of `layer.forward(x)`
layer = attnpack.GroupedQueryAttention(8, 4, 2, causal=True)
assert_type(layer(x), Tensor)
assert_type(layer(x, x, cache=kept, need_weights=True), tuple[Tensor, Tensor])
assert_type(layer(x, need_weights=flag), Tensor | Pair)
assert_type(layer.forward(x, need_weights=True), tuple[Tensor, Tensor])
assert_type(attnpack.SelfAttention(8)(x, need_weights=True), tuple[Tensor, Tensor])
assert_type(attnpack.MultiQueryAttention(8, 2)(x, key_block=2, key_index=x), Tensor)
layer(x, casual=True)  # wrong
layer(x, cache=attnpack.ModelCache(1))  # wrong


def attend(
    latent: attnpack.MultiHeadLatentAttention,
    sparse: attnpack.SparseAttention,
    sparse_latent: attnpack.SparseLatentAttention,
    projected: attnpack.ProjectedAttention,
    compressed: attnpack.CompressedAttention,
) -> None:
    assert_type(compressed(x), Tensor)
    assert_type(latent(x, key_index=x), Tensor)
    assert_type(latent(x, need_weights=True), tuple[Tensor, Tensor])
    assert_type(sparse(x, cache=attnpack.SparseCache()), Tensor)
    assert_type(sparse(x, need_weights=True), tuple[Tensor, Tensor])
    assert_type(sparse_latent(x, index_cache=attnpack.LatentCache()), Tensor)
    assert_type(sparse_latent(x, need_weights=True), tuple[Tensor, Tensor])
    assert_type(projected(x, x, x), Tensor)
    assert_type(projected(x, x, x, need_weights=True), tuple[Tensor, Tensor])
    latent(x, key_block=2)  # wrong


def recur(layer: attnpack.GatedDeltaNet, kimi: attnpack.KimiDeltaAttention, plain: attnpack.LinearAttention) -> None:
    assert_type(layer(x, cache=attnpack.RecurrentCache(), kv_lens=x), Tensor)
    assert_type(kimi(x, cu_seqlens=x), Tensor)
    assert_type(plain(x), Tensor)
    layer(x, cache=attnpack.DynamicCache())  # wrong


def run(model: attnpack.CausalLM, both: attnpack.EncoderDecoder, block: attnpack.DecoderBlock) -> None:
    assert_type(model(x, attnpack.ModelCache(2)), Tensor)
    assert_type(model.generate(x, max_new_tokens=2), Tensor)
    assert_type(both(x, x), Tensor)
    assert_type(block(x, cache=kept), Tensor)
    model("a text")  # wrong


# ---- conversion
assert_type(convert.to_gqa(layer, 1, window=2), attnpack.GroupedQueryAttention)
assert_type(convert.to_mqa(layer, "first"), attnpack.MultiQueryAttention)
assert_type(convert.to_mla(layer, 8)(x), Tensor)
assert_type(convert.to_gqa(attnpack.CausalLM(8, 8, 1, 2), 1), attnpack.CausalLM)
assert_type(convert.to_mqa(layer.cpp()), cpp.MultiQueryAttention)
assert_type(convert.from_torch(torch.nn.Transformer()), attnpack.EncoderDecoder)
convert.to_mqa(layer, groups=[[0, 1]])  # wrong

# ---- a module is a function too, and keeps its types under torch.compile
feed_forward = attnpack.FeedForward(8, 16)
function: Callable[[Tensor], Tensor] = layer
function = feed_forward
assert_type(torch.compile(feed_forward)(x), Tensor)
assert_type(attnpack.RMSNorm(8)(x), Tensor)
assert_type(attnpack.RotaryEmbedding(8)(x, x), Tensor)
feed_forward(8)  # wrong


class Own(attnpack.FeedForward):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(x) * factor


assert_type(Own(8, 16)(x, 2.0), Tensor)

# ---- the classes of C++
twin = cpp.GroupedQueryAttention(8, 4, 2, rope=cpp.RotaryEmbedding(2, base=1e6))
assert_type(twin(x), Tensor)
assert_type(twin(x, x, cache=cpp.DynamicCache(), need_weights=True), tuple[Tensor, Tensor])
assert_type(twin.forward_with_weights(x, causal=True), tuple[Tensor, Tensor])
assert_type(layer.cpp(), cpp.GroupedQueryAttention)
assert_type(attnpack.MultiQueryAttention(8, 2).cpp(), cpp.MultiQueryAttention)
assert_type(attnpack.FeedForward.from_cpp(feed_forward.cpp()), attnpack.FeedForward)
assert_type(cpp.FeedForward(8, 16, activation="gelu")(x), Tensor)
assert_type(cpp.CausalLM(8, 8, 1, 2).generate(x, max_new_tokens=2, top_k=4), Tensor)
twin(x, cache=kept)  # wrong
twin(x, casual=True)  # wrong
cpp.FeedForward(8, 16, actvation="gelu")  # wrong
cpp.StaticCache(1, 2, 3)  # wrong
cpp.CausalLM(8, 8, 1, 2).generate(x, max_new_tokens=2, topk=4)  # wrong
