#include <attnpack/layers/select_keys.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {

namespace {

using at::Tensor;
using c10::SymInt;

constexpr double kInf = std::numeric_limits<double>::infinity();

struct PlaceArguments {
  bool causal = false;
  std::optional<Tensor> q_offsets = {}, kv_lens = {};

  auto members() const { return std::tie(causal, q_offsets, kv_lens); }
};
#define ATTNPACK_PLACE_SCHEMA "bool causal, Tensor? q_offsets, Tensor? kv_lens"

Tensor count(const SymInt& n, const Tensor& like) {  // 0..n-1
  return at::arange(n, at::TensorOptions(at::kLong).device(like.device()));
}

void check_numbers(const char* name, const std::optional<Tensor>& numbers, const Tensor& query) {
  ATTNPACK_CHECK(!numbers || (numbers->dim() == 1 && numbers->sym_size(0) == query.sym_size(0) &&
                              (numbers->scalar_type() == at::kLong || numbers->scalar_type() == at::kInt)),
                 name, " has shape ", numbers->sym_sizes(), " and dtype ", numbers->scalar_type(),
                 ", wants int32 or int64 [batch] = [", query.sym_size(0), "]");
}

void check_query_and_key(const Tensor& query, const Tensor& key, const PlaceArguments& place) {
  ATTNPACK_CHECK(query.dim() == 4 && query.is_floating_point(), "query has shape ", query.sym_sizes(), " and dtype ",
                 query.scalar_type(), ", wants floating numbers [batch, heads, length, head_dim]");
  ATTNPACK_CHECK(key.dim() == 4 && key.is_floating_point() && key.sym_size(0) == query.sym_size(0) &&
                     key.sym_size(3) == query.sym_size(3) && key.sym_size(1) >= 1,
                 "key has shape ", key.sym_sizes(), " and dtype ", key.scalar_type(), ", wants floating numbers [",
                 query.sym_size(0), ", num_kv_heads, kv_len, ", query.sym_size(3), "]");
  ATTNPACK_CHECK(key.device() == query.device(), "key is on ", key.device(), ", query on ", query.device(),
                 ": move one of them with .to()");
  check_numbers("q_offsets", place.q_offsets, query);
  check_numbers("kv_lens", place.kv_lens, query);
}

// [B or 1, 1, L, 1], the position of each query
Tensor positions_of(const Tensor& query, const PlaceArguments& place) {
  const Tensor steps = count(query.sym_size(2), query).view_symint({1, 1, query.sym_size(2), 1});
  return place.q_offsets ? steps + place.q_offsets->to(at::kLong).view({-1, 1, 1, 1}) : steps;
}

// Scores [B, H, L, Lkv] in fp32 at least, -inf for a key that the query may not attend.
Tensor hide(const Tensor& scores, const Tensor& query, const PlaceArguments& place) {
  const Tensor slots = count(scores.sym_size(3), scores);
  Tensor result = scores;
  if (place.causal) result = result.masked_fill(slots > positions_of(query, place), -kInf);
  if (place.kv_lens) result = result.masked_fill(slots >= place.kv_lens->view({-1, 1, 1, 1}), -kInf);
  return result;
}

// The numbers of the best n, -1 for those of score -inf.
Tensor best(const Tensor& scores, const SymInt& n) {
  const auto [held, index] = scores.topk_symint(n, -1);
  return index.masked_fill(held == -kInf, -1).to(at::kInt);
}

at::ScalarType wide_of(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

Tensor select_keys_composite(const Tensor& query, const Tensor& key, const Tensor& weights, SymInt top_k,
                             const PlaceArguments& place) {
  check_query_and_key(query, key, place);
  ATTNPACK_CHECK(top_k >= 1, "top_k is ", top_k, ", wants at least 1");
  ATTNPACK_CHECK(key.sym_size(1) == 1, "key has ", key.sym_size(1), " heads, wants one, which all heads score");
  ATTNPACK_CHECK(weights.dim() == 3 && weights.is_floating_point() && weights.sym_size(0) == query.sym_size(0) &&
                     weights.sym_size(1) == query.sym_size(2) && weights.sym_size(2) == query.sym_size(1),
                 "weights has shape ", weights.sym_sizes(), " and dtype ", weights.scalar_type(),
                 ", wants floating numbers [", query.sym_size(0), ", ", query.sym_size(2), ", ", query.sym_size(1),
                 "]");
  const auto wide = wide_of(query);
  const Tensor products = at::matmul(query.detach().to(wide), key.detach().to(wide).transpose(2, 3)).relu();
  const Tensor by_head = weights.detach().to(wide).transpose(1, 2).unsqueeze(-1);  // [B, H, L, 1]
  const Tensor scores = (products * by_head).sum(1, /*keepdim=*/true);
  return best(hide(scores, query, place), top_k.min(key.sym_size(2)));
}

// [B, Hkv, blocks, block, D], zeros after the end of the keys
Tensor in_blocks(const Tensor& key, const SymInt& blocks, const SymInt& block) {
  return at::constant_pad_nd_symint(key, {0, 0, 0, blocks * block - key.sym_size(2)})
      .unflatten_symint(2, {blocks, block});
}

// [B or 1, 1, blocks, 1], how many keys of each block are valid
Tensor keys_of_blocks(const Tensor& key, const SymInt& blocks, const SymInt& block, const PlaceArguments& place) {
  const Tensor starts = (count(blocks, key) * block).view_symint({1, 1, blocks, 1});
  const Tensor left = place.kv_lens ? place.kv_lens->to(at::kLong).view({-1, 1, 1, 1}) - starts
                                    : starts.neg() + at::Scalar(key.sym_size(2));
  return left.clamp(at::Scalar(0), at::Scalar(block));
}

// Scores of the blocks for each query head, [B, Hq, L, blocks].
Tensor score_blocks(const Tensor& query, const Tensor& key, const SymInt& blocks, const SymInt& block,
                    c10::string_view scorer, const PlaceArguments& place) {
  const auto wide = wide_of(query);
  const SymInt kv_heads = key.sym_size(1), group = query.sym_size(1) / kv_heads;
  const Tensor q = query.detach().to(wide).unflatten_symint(1, {kv_heads, group});  // [B, Hkv, G, L, D]
  const Tensor k = key.detach().to(wide);
  if (scorer == "mean") {
    const Tensor slots = count(key.sym_size(2), key).view_symint({1, 1, key.sym_size(2), 1});
    const Tensor valid = place.kv_lens ? k.masked_fill(slots >= place.kv_lens->view({-1, 1, 1, 1}), 0) : k;
    const Tensor sums = in_blocks(valid, blocks, block).sum(3);  // [B, Hkv, blocks, D]
    const Tensor means = sums / keys_of_blocks(key, blocks, block, place).clamp_min(1);
    return at::matmul(q, means.unsqueeze(2).transpose(3, 4)).flatten(1, 2);
  }
  const Tensor products = at::matmul(q, k.unsqueeze(2).transpose(3, 4)).flatten(1, 2);  // [B, Hq, L, Lkv]
  const Tensor hidden = hide(products, query, place);
  return at::constant_pad_nd_symint(hidden, {0, blocks * block - key.sym_size(2)}, -kInf)
      .unflatten_symint(3, {blocks, block})
      .amax(-1);
}

Tensor select_blocks_composite(const Tensor& query, const Tensor& key, SymInt block, SymInt top_blocks,
                               SymInt local_blocks, c10::string_view scorer, const PlaceArguments& place) {
  check_query_and_key(query, key, place);
  ATTNPACK_CHECK(query.sym_size(1) % key.sym_size(1) == 0, "key has ", key.sym_size(1),
                 " heads, wants a number that divides the ", query.sym_size(1), " heads of query");
  ATTNPACK_CHECK(scorer == "mean" || scorer == "max", "scorer: got '", scorer, "', want 'mean' or 'max'");
  ATTNPACK_CHECK(block >= 1, "block is ", block, ", wants at least 1 key");
  ATTNPACK_CHECK(top_blocks >= 1, "top_blocks is ", top_blocks, ", wants at least 1");
  ATTNPACK_CHECK(local_blocks >= 0 && local_blocks <= top_blocks, "local_blocks is ", local_blocks, ", wants 0 to ",
                 top_blocks, ", top_blocks");
  ATTNPACK_CHECK(
      scorer == "max" || !place.causal || local_blocks >= 1,
      "local_blocks is 0 for a causal 'mean', which knows the keys after the query in its own block; want at ",
      "least 1, or take 'max'");
  const SymInt blocks = (key.sym_size(2) + block - 1) / block;
  Tensor scores = score_blocks(query, key, blocks, block, scorer, place);
  const Tensor numbers = count(blocks, key), own = positions_of(query, place).floor_divide(at::Scalar(block));
  const Tensor empty = keys_of_blocks(key, blocks, block, place).transpose(2, 3) == 0;  // [B or 1, 1, 1, blocks]
  const Tensor after = place.causal ? empty.logical_or(numbers > own) : empty;
  // Summed before anything is hidden: -inf of one head would hide the block from the others, which see the same.
  scores = scores.unflatten_symint(1, {key.sym_size(1), query.sym_size(1) / key.sym_size(1)}).sum(2);
  scores = scores.masked_fill((numbers <= own).logical_and(numbers > own - at::Scalar(local_blocks)), kInf);
  return best(scores.masked_fill(after, -kInf), top_blocks.min(blocks));
}

PlaceArguments place_arguments(const SelectionPlace& place) { return {place.causal, place.q_offsets, place.kv_lens}; }

}  // namespace

Tensor select_keys(const Tensor& query, const Tensor& key, const Tensor& weights, int64_t top_k,
                   const SelectionPlace& place) {
  static const DispatchedOp<decltype(select_keys_composite)> op("attnpack::select_keys");
  return op(query, key, weights, top_k, place_arguments(place));
}

Tensor select_blocks(const Tensor& query, const Tensor& key, const BlockOptions& o, const SelectionPlace& place) {
  static const DispatchedOp<decltype(select_blocks_composite)> op("attnpack::select_blocks");
  return op(query, key, o.block, o.top_blocks, o.local_blocks, o.scorer, place_arguments(place));
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack;
  m.def("select_keys(Tensor query, Tensor key, Tensor weights, SymInt top_k, " ATTNPACK_PLACE_SCHEMA ") -> Tensor",
        from_schema<select_keys_composite>);
  m.def(
      "select_blocks(Tensor query, Tensor key, SymInt block, SymInt top_blocks, SymInt local_blocks, str "
      "scorer, " ATTNPACK_PLACE_SCHEMA ") -> Tensor",
      from_schema<select_blocks_composite>);
}
