// Undefined tensors and sizes that no memory has: each error names the argument.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

const at::Tensor none;

template <typename F>
bool names(const std::string& argument, const F& f) {
  return complains("attnpack: " + argument + " is undefined", f);
}

}  // namespace

TEST_CASE("attention names an undefined argument") {
  const auto x = torch::randn({1, 2, 3, 8});
  REQUIRE(names("query", [] { attention(none, none, none); }));
  REQUIRE(names("key", [&] { attention(x, none, x); }));
  REQUIRE(names("value", [&] { attention(x, x, none); }));
  REQUIRE(names("query", [&] { attention_scores(none, x); }));
  const auto with = [&](const AttentionOptions& options) { return [&x, options] { attention(x, x, x, options); }; };
  REQUIRE(names("mask", with(AttentionOptions().mask(none))));
  REQUIRE(names("kv_lens", with(AttentionOptions().kv_lens(none).q_offset(End{}))));
  REQUIRE(names("sinks", with(AttentionOptions().sinks(none))));
  REQUIRE(names("alibi_slopes", with(AttentionOptions().alibi_slopes(none))));
  REQUIRE(names("q_offsets", with(AttentionOptions().q_offset(none))));
}

TEST_CASE("every op names an undefined argument") {
  const auto x = torch::randn({3, 2, 8}), ends = at::tensor({0, 3}, at::kInt);
  REQUIRE(names("cu_seqlens_q", [&] { attention_varlen(x, x, x, none); }));
  REQUIRE(names("value", [&] { attention_varlen(x, x, none, ends); }));
  REQUIRE(names("sinks", [&] { attention_varlen(x, x, x, ends, VarlenOptions().sinks(none)); }));
  REQUIRE(names("weight", [&] { rms_norm(x, none, 1e-6); }));
  const auto heads = torch::randn({1, 2, 3, 8});
  REQUIRE(names("key", [&] { linear_attention(heads, none, heads); }));
  REQUIRE(names("beta", [&] { linear_attention(heads, heads, heads, RecurrenceOptions().beta(none)); }));
  REQUIRE(names("input", [&] { attnpack::linear(none, x); }));
  REQUIRE(names("bias", [&] { attnpack::linear(x, x, none); }));
  REQUIRE(names("weights[1]", [&] { linears(x, {x.select(0, 0), none}); }));
  REQUIRE(names("cos", [&] { apply_rope(x, none, x); }));
  REQUIRE(names("positions", [] { rope_table(none, {1.0}); }));
  REQUIRE(names("lengths", [&] { rope_table_by_length(at::arange(2), none, {1.0}, 1.0, {}, 1.0, 8); }));
  REQUIRE(names("x", [] { quantize_rows(none, 8); }));
  REQUIRE(names("rows", [] { dequantize_rows(none, 8, 8, at::kFloat); }));
  REQUIRE(names("lse_b", [&] { merge_states(x, x.select(2, 0), x, none); }));
  REQUIRE(names("x", [] { null(none); }));
  const auto cache = torch::zeros({1, 2, 4, 8}), lengths = at::zeros({1}, at::kLong);
  REQUIRE(names("lengths", [&] { kv_cache_append_(cache, cache.clone(), none, cache, cache); }));
  REQUIRE(names("new_lens", [&] { kv_cache_append_(cache, cache.clone(), lengths, cache, cache, none); }));
  REQUIRE(names("block_table", [&] { kv_cache_append_paged_(cache, cache.clone(), none, lengths, cache, cache); }));
  REQUIRE(names("pool", [&] { gather_pages(none, none, lengths, 4); }));
  REQUIRE(names("lengths", [] { longest_length(none, 4); }));
}

TEST_CASE("layers and caches name an undefined argument") {
  const auto x = torch::randn({1, 2, 3, 8});
  REQUIRE(names("value", [&] { attend(x, x, none); }));
  AttendOptions options;
  options.cache = CacheTensors{x.clone(), none, at::zeros({1}, at::kLong)};
  REQUIRE(names("cache_value", [&] { attend(x, x, x, options); }));
  REQUIRE(names("query", [&] { rotate(none, x, {}); }));
  REQUIRE(names("latent", [&] { latent_attend(x, none, x, std::nullopt, 8, "auto"); }));
  DynamicCache dynamic;
  StaticCache fixed(1, 2, 4, 8);
  PagedCache paged(PagedCacheOptions(1, 2, 8, 4));
  REQUIRE(names("key", [&] { dynamic.reserve(none, x); }));
  REQUIRE(names("value", [&] { fixed.reserve(x, none); }));
  REQUIRE(names("key", [&] { paged.reserve(none, none); }));
  REQUIRE(names("index", [&] { fixed.reorder(none); }));
  REQUIRE(names("rows", [&] { paged.release(none); }));
  REQUIRE(names("key", [&] { CrossCache().store(none, x, std::nullopt); }));
  REQUIRE(names("latents", [&] { LatentCache().reserve_latents(none, 4); }));
  REQUIRE(names("key", [&] { QuantizedCache(8).reserve(none, x); }));
  REQUIRE(names("key", [&] { SlidingWindowCache(4).reserve(none, x); }));
}

TEST_CASE("modules name an undefined argument") {
  const auto x = torch::randn({1, 3, 24});
  GroupedQueryAttention layer(GroupedQueryAttentionOptions(24, 4, 2).rope(RotaryEmbedding(6)));
  REQUIRE(names("x", [&] { layer->forward(none); }));
  REQUIRE(names("context", [&] { layer->forward(x, none); }));
  REQUIRE(names("mask", [&] { layer->forward(x, AttentionInputs().mask(none)); }));
  REQUIRE(names("positions", [&] { layer->forward(x, AttentionInputs().positions(none)); }));
  REQUIRE(names("kv_lens", [&] { layer->forward(x, AttentionInputs().kv_lens(none)); }));
  ProjectedAttention projected(ProjectedAttentionOptions(4, 4, 6));
  REQUIRE(names("k", [&] { projected->forward(x, none, x); }));
  MultiHeadLatentAttention latent(
      MultiHeadLatentAttentionOptions(24, 4).kv_lora_rank(8).qk_nope_head_dim(4).qk_rope_head_dim(2).v_head_dim(4).rope(
          RotaryEmbedding(2)));
  REQUIRE(names("x", [&] { latent->forward(none); }));
  REQUIRE(names("input", [] { Linear(3, 4)->forward(none); }));
  REQUIRE(names("x", [] { RMSNorm(RMSNormOptions(8))->forward(none); }));
  REQUIRE(names("x", [] { LayerNorm(LayerNormOptions(8))->forward(none); }));
  REQUIRE(names("x", [] { FeedForward(8, 8)->forward(none); }));
  REQUIRE(names("x", [] { RotaryEmbedding(8)->forward(none); }));
  REQUIRE(names("ids", [] { Embedding(EmbeddingOptions(8, 8))->forward(none); }));
  DecoderBlock block(DecoderBlockOptions(layer, FeedForward(24, 8)));
  REQUIRE(names("x", [&] { block->forward(none); }));
  CausalLM model(CausalLMOptions(32, 24, 2, 4).num_kv_heads(2).hidden_dim(32));
  REQUIRE(names("ids", [&] { model->forward(none); }));
  REQUIRE(names("ids", [&] { generate(*model, none, GenerateOptions(2)); }));
  REQUIRE(names("hidden", [&] { model->head(none); }));
  const auto ids = at::zeros({1, 2}, at::kLong);
  REQUIRE(names("lengths", [&] { model->forward(ids, CausalLMInputs().lengths(none)); }));
}

TEST_CASE("conversion names an undefined weight") {
  const auto x = torch::randn({8, 4});
  REQUIRE(names("weight", [] { convert::split_qkv(none, "concat", 2, 1); }));
  REQUIRE(names("k", [&] { convert::fuse_qkv(x, none, x, "concat", 2, 1); }));
  REQUIRE(names("weight", [] { convert::pool_kv_heads(none, 2, 1); }));
}

TEST_CASE("sizes that no memory has are named") {
  const int64_t huge = int64_t{1} << 62;
  const std::string more = "more than 2^63 bytes";
  REQUIRE(complains("out_features and in_features", [&] { Linear(huge, 3); }));
  REQUIRE(complains(more, [&] { Linear(huge, 3); }));
  REQUIRE(complains("vocab_size and embed_dim", [&] { Embedding(EmbeddingOptions(huge, 8)); }));
  REQUIRE(complains("dim make", [&] { RMSNorm(RMSNormOptions(huge)); }));
  REQUIRE(complains(more, [&] { StaticCache(1, 2, huge, 8); }));
  REQUIRE(complains("cache: its batch, kv heads, positions and head_dim", [&] { StaticCache(huge, huge, 4, 4); }));
  REQUIRE(complains(more, [&] { PagedCache(PagedCacheOptions(1, 1 << 30, 1 << 30, 1 << 30)); }));
  REQUIRE(complains("head_dim: got 4611686018427387904 for 4 heads",
                    [&] { GroupedQueryAttention(GroupedQueryAttentionOptions(24, 4, 2).head_dim(huge)); }));
}

}  // namespace attnpack
