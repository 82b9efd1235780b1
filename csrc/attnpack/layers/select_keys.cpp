#include <attnpack/layers/select_keys.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <limits>

#include <attnpack/core/padded.h>
#include <attnpack/layers/detail/best_numbers.h>
#include <attnpack/layers/detail/block_sums.h>
#include <attnpack/layers/detail/place_tokens.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/row_pieces.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/selected_columns.h>
#include <attnpack/ops/detail/unknown_sizes.h>
#include <attnpack/ops/key_products.h>

namespace attnpack {

namespace {

using at::Tensor;
using c10::SymInt;

struct PlaceArguments {
  bool causal = false;
  std::optional<Tensor> q_offsets = {}, kv_lens = {}, mask = {};

  auto members() const { return std::tie(causal, q_offsets, kv_lens, mask); }
};
// mask has a default, so every argument after it has one too.
#define ATTNPACK_PLACE_SCHEMA "bool causal, Tensor? q_offsets, Tensor? kv_lens, Tensor? mask=None"

void check_numbers(const char* name, const std::optional<Tensor>& numbers, const Tensor& query) {
  if (numbers) check_dense(name, *numbers);
  ATTNPACK_CHECK(!numbers || (numbers->dim() == 1 && numbers->sym_size(0) == query.sym_size(0) &&
                              (numbers->scalar_type() == at::kLong || numbers->scalar_type() == at::kInt)),
                 name, " has shape ", numbers->sym_sizes(), " and dtype ", numbers->scalar_type(),
                 ", wants int32 or int64 [batch] = [", query.sym_size(0), "]");
}

void check_mask_of_choice(const Tensor& mask, const Tensor& query) {
  check_dense("mask", mask);
  const auto fits = [&](int64_t from_last, const SymInt& size) {
    const int64_t d = mask.dim() - from_last;
    return d < 0 || is_one(mask.sym_size(d)) || mask.sym_size(d) == size;
  };
  ATTNPACK_CHECK(mask.dim() >= 1 && mask.dim() <= 4 && fits(2, query.sym_size(2)) && fits(4, query.sym_size(0)) &&
                     (mask.scalar_type() == at::kBool || mask.is_floating_point()),
                 "mask has shape ", mask.sym_sizes(), " and dtype ", mask.scalar_type(),
                 ", wants bools or floating numbers that broadcast to [", query.sym_size(0), ", num_heads, ",
                 query.sym_size(2), ", keys]");
  ATTNPACK_CHECK(mask.device() == query.device(), "mask is on ", mask.device(), ", query on ", query.device(),
                 ": move one of them with .to()");
}

void check_query_and_key(const Tensor& query, const Tensor& key, const PlaceArguments& place) {
  check_dense("query", query);
  check_dense("key", key);
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
  if (place.mask) check_mask_of_choice(*place.mask, query);
}

// [B or 1, 1, L, 1], the position of each query
Tensor positions_of(const Tensor& query, const PlaceArguments& place) {
  const Tensor steps = count_from_zero(query.sym_size(2), query).view_symint({1, 1, query.sym_size(2), 1});
  return place.q_offsets ? steps + place.q_offsets->to(at::kLong).view({-1, 1, 1, 1}) : steps;
}

// Scores [B, H, L, n] of the keys with the numbers `slots`, -inf for a key that the query may not attend.
Tensor hide(const Tensor& scores, const Tensor& slots, const Tensor& query, const PlaceArguments& place) {
  Tensor last;  // the last position that a query may attend, [B or 1, 1, L or 1, 1]
  if (place.kv_lens) last = place.kv_lens->to(at::kLong).view({-1, 1, 1, 1}) - 1;
  if (place.causal) last = last.defined() ? positions_of(query, place).minimum(last) : positions_of(query, place);
  return last.defined() ? scores.masked_fill(slots > last, -kInf) : scores;
}

// Scores [B, H, L, Lkv] of all keys.
Tensor hide(const Tensor& scores, const Tensor& query, const PlaceArguments& place) {
  return hide(scores, count_from_zero(scores.sym_size(3), scores), query, place);
}

// The numbers that a mask adds to the scores of `keys` keys, [B or 1, kv_heads or 1, L or 1, keys or 1]. Query heads
// that share a choice use their maximum.
Tensor bias_of(const Tensor& mask, const SymInt& kv_heads, const SymInt& keys, at::ScalarType wide) {
  Tensor bias = mask.detach();
  bias = mask.scalar_type() == at::kBool
             ? at::zeros({}, mask.options().dtype(wide)).masked_fill(bias.logical_not(), -kInf)
             : bias.to(wide);
  while (bias.dim() < 4) bias = bias.unsqueeze(0);
  const SymInt heads = bias.sym_size(1), width = bias.sym_size(3);
  if (heads != 1)
    bias = heads % kv_heads == 0 ? bias.unflatten_symint(1, {kv_heads, heads / kv_heads}).amax(2)
                                 : bias.amax(1, /*keepdim=*/true);
  if (width == 1 || width == keys) return bias;
  // A cache has room for more keys than the mask names.
  return at::constant_pad_nd_symint(bias, {0, keys - width}, -kInf);
}

// The largest number of each block of the last dim, [..., keys] -> [..., blocks].
Tensor block_maxima(const Tensor& x, const SymInt& blocks, const SymInt& block) {
  return at::constant_pad_nd_symint(x, {0, blocks * block - x.sym_size(-1)}, -kInf)
      .unflatten_symint(-1, {blocks, block})
      .amax(-1);
}

// Calls select(rows, place, first row) for some rows of query at a time, and joins the results: [B, heads, L, n].
template <typename Select>
Tensor in_pieces(const Tensor& query, const SymInt& keys, const PlaceArguments& place, const Select& select) {
  return in_row_pieces(query, keys, [&](const Tensor& rows, int64_t first) {
    if (first == 0 && rows.is_same(query)) return select(rows, place, first);
    PlaceArguments of_piece = place;
    const Tensor offsets =
        place.q_offsets ? place.q_offsets->to(at::kLong) : at::zeros({query.size(0)}, query.options().dtype(at::kLong));
    of_piece.q_offsets = offsets + first;
    if (place.mask) of_piece.mask = narrow_rows(*place.mask, first, rows.sym_size(2));
    return select(rows, of_piece, first);
  });
}

void check_indexer(const Tensor& query, const Tensor& key, const Tensor& weights, const PlaceArguments& place) {
  check_query_and_key(query, key, place);
  check_dense("weights", weights);
  ATTNPACK_CHECK(is_one(key.sym_size(1)), "key has ", key.sym_size(1), " heads, wants one, which all heads score");
  ATTNPACK_CHECK(weights.dim() == 3 && weights.is_floating_point() && weights.sym_size(0) == query.sym_size(0) &&
                     weights.sym_size(1) == query.sym_size(2) && weights.sym_size(2) == query.sym_size(1),
                 "weights has shape ", weights.sym_sizes(), " and dtype ", weights.scalar_type(),
                 ", wants floating numbers [", query.sym_size(0), ", ", query.sym_size(2), ", ", query.sym_size(1),
                 "]");
}

void check_count(const SymInt& top_k, const SymInt& local_keys) {
  ATTNPACK_CHECK(top_k >= 1, "top_k is ", top_k, ", wants at least 1");
  ATTNPACK_CHECK(local_keys >= 0 && local_keys <= top_k, "local_keys is ", local_keys, ", wants 0 to ", top_k,
                 ", top_k");
}

// sum_h weights_h relu(products_h), [B, 1, L, Lkv]
Tensor score_keys(const Tensor& products,                                                   // [B, H, L, Lkv]
                  const Tensor& weights) {                                                  // [B, L, H]
  const Tensor by_head = weights.to(products.scalar_type()).transpose(1, 2).unsqueeze(-1);  // [B, H, L, 1]
  if (products.requires_grad() || at::isTensorSubclassLike(products))
    return (products.relu() * by_head).sum(1, /*keepdim=*/true);
  return products.relu_().mul_(by_head).sum(1, /*keepdim=*/true);  // they are the caller's own
}

Tensor select_keys_composite(const Tensor& query, const Tensor& key, const Tensor& weights, SymInt top_k,
                             const PlaceArguments& place, SymInt local_keys) {
  check_indexer(query, key, weights, place);
  check_count(top_k, local_keys);
  const SymInt keys = key.sym_size(2);
  return in_pieces(query, keys, place, [&](const Tensor& rows, const PlaceArguments& here, int64_t first) {
    const Tensor of_rows = weights.detach().narrow_symint(1, first, rows.sym_size(2));
    Tensor scores = score_keys(key_products(rows, key), of_rows), bias;
    if (here.mask) bias = bias_of(*here.mask, 1, keys, scores.scalar_type());
    if (bias.defined()) scores = scores + bias;
    if (local_keys > 0) {
      const Tensor behind = positions_of(rows, here) - count_from_zero(keys, key);  // [B or 1, 1, L, Lkv]
      scores = scores.masked_fill((behind >= 0).logical_and(behind < at::Scalar(local_keys)), kInf);
    }
    if (bias.defined()) scores = scores.masked_fill(bias == -kInf, -kInf);  // NaN and the local keys too
    return best_numbers(hide(scores, rows, here), top_k.min(keys));
  });
}

// Values of no width: the op that appends takes keys and values.
Tensor narrowed_to_none(const Tensor& x) { return x.narrow(3, 0, 0); }

Tensor index_keys_composite(const Tensor& query, const Tensor& key, const Tensor& weights, SymInt top_k,
                            SymInt local_keys, const LatentCacheArguments& cache, const LayerArguments& layer,
                            bool causal) {
  check_indexer(query, key, weights, {causal, std::nullopt, layer.kv_lens, layer.mask});
  check_count(top_k, local_keys);
  ATTNPACK_CHECK(key.sym_size(2) == query.sym_size(2), "key has length ", key.sym_size(2), ", query ",
                 query.sym_size(2), ": the indexer reads its own tokens");
  ATTNPACK_CHECK(!cache.latents || cache.lengths, "cache has no lengths: pass both of its tensors");
  LayerArguments plain = layer;
  plain.mask = std::nullopt;
  const auto tensors =
      cache.latents ? std::make_optional(CacheTensors{*cache.latents, cache.latents->narrow(-1, 0, 0), *cache.lengths})
                    : std::nullopt;
  const PlacedTokens tokens = place_tokens({query.detach(), key.detach(), narrowed_to_none(key.detach())}, tensors,
                                           plain, [](const Tensor&, const Tensor&, const std::optional<Tensor>&) {});
  return select_keys_composite(tokens.query, tokens.key, weights, top_k,
                               {causal, tokens.q_offsets, tokens.kv_lens, layer.mask}, local_keys);
}

// [B, 1, L, keys], true where key_index has a key
Tensor mask_of_index(const Tensor& key_index, const SymInt& keys) {
  const Tensor index = key_index.to(at::kLong);
  auto shape = index.sym_sizes().vec();
  shape.back() = keys + 1;  // the last for -1
  const Tensor none = at::zeros_symint(shape, index.options().dtype(at::kBool));
  return none.scatter(3, at::where(index < 0, at::Scalar(keys), index), true).narrow_symint(3, 0, keys);
}

void check_loss(const Tensor& query, const Tensor& key, const Tensor& probabilities,
                const std::optional<Tensor>& key_index, bool at_names) {
  check_dense("probabilities", probabilities);
  if (key_index) check_dense("key_index", *key_index);
  const SymInt batch = query.sym_size(0), length = query.sym_size(2), keys = key.sym_size(2);
  ATTNPACK_CHECK(length == keys, "key has length ", keys, ", query ", length, ": the indexer reads its own tokens");
  ATTNPACK_CHECK(!key_index || (key_index->dim() == 4 && key_index->sym_size(0) == batch &&
                                is_one(key_index->sym_size(1)) && key_index->sym_size(2) == length &&
                                at::isIntegralType(key_index->scalar_type(), /*includeBool=*/false)),
                 "key_index has shape ", key_index->sym_sizes(), " and dtype ", key_index->scalar_type(),
                 ", wants int32 or int64 [", batch, ", 1, ", length, ", n]");
  check_at_names(at_names, key_index);
  const SymInt width = at_names ? key_index->sym_size(3) : keys;
  ATTNPACK_CHECK(
      probabilities.dim() == 4 && probabilities.is_floating_point() && probabilities.sym_size(0) == batch &&
          probabilities.sym_size(2) == length && probabilities.sym_size(3) == width,
      "probabilities has shape ", probabilities.sym_sizes(), " and dtype ", probabilities.scalar_type(),
      ", wants floating numbers [", batch, ", num_heads, ", length, ", ", width, "], one for each ",
      at_names ? "name of key_index" : "key (probabilities at only the keys of key_index want at_names=True)");
  if (key_index && key_index->is_cpu() && !at::isTensorSubclassLike(*key_index))
    check_key_index_values(*key_index, /*key_block=*/1, keys.guard_int(__FILE__, __LINE__));
}

// The products [B, H, L, n] of queries with the keys that each row names: a row is a sequence of a call over its keys.
Tensor selected_products(const Tensor& query, const Tensor& key, const Tensor& names) {
  const SymInt batch = query.sym_size(0), length = query.sym_size(2);
  const Tensor keys = at::index(key.squeeze(1), {count_from_zero(batch, key).view({-1, 1, 1}), names.squeeze(1)});
  const Tensor rows = query.transpose(1, 2).flatten(0, 1).unsqueeze(2);
  const Tensor products = key_products_formula(rows, keys.flatten(0, 1).unsqueeze(1));
  return products.squeeze(2).unflatten_symint(0, {batch, length}).transpose(1, 2);
}

// The scores I, [B, 1, L, Lkv]; with `names` only those of the keys with these numbers, [B, 1, L, n].
Tensor loss_scores(const Tensor& query, const Tensor& key, const Tensor& weights, const PlaceArguments& place,
                   const std::optional<Tensor>& names = std::nullopt) {
  const SymInt keys = key.sym_size(2);
  const double size = static_cast<double>((query.sym_size(1) * query.sym_size(3)).guard_int(__FILE__, __LINE__));
  const Tensor products = names ? selected_products(query, key, *names) : key_products_formula(query, key);
  Tensor scores = score_keys(products, weights) / std::sqrt(size);
  if (place.mask) {
    const Tensor bias = bias_of(*place.mask, 1, keys, scores.scalar_type());
    scores = scores +
             (names ? at_columns(bias.expand_symint({query.sym_size(0), 1, query.sym_size(2), keys}), *names) : bias);
  }
  return hide(scores, names ? *names : count_from_zero(keys, scores), query, place);
}

Tensor indexer_loss_composite(const Tensor& query, const Tensor& key, const Tensor& weights,
                              const Tensor& probabilities, const std::optional<Tensor>& key_index,
                              const LayerArguments& layer, bool causal, bool at_names) {
  const PlaceArguments place{causal, std::nullopt, layer.kv_lens, layer.mask};
  check_indexer(query, key, weights, place);
  check_loss(query, key, probabilities, key_index, at_names);
  if (layer.positions) check_dense("positions", *layer.positions);
  const auto [q, k] = rotate_tokens({query, key, key}, rope_settings(layer.rope),
                                    {layer.positions, layer.cross, std::nullopt, layer.kv_lens});
  Tensor scores, sum = probabilities.detach().to(accumulation_type(query)).sum(1, /*keepdim=*/true), hidden;
  if (at_names) {
    const SelectedColumns names = selected_columns(*key_index, /*key_block=*/1, key.sym_size(2));
    scores = loss_scores(q, k, weights, place, names.keys);
    hidden = names.counted.logical_not();
    sum = sum.masked_fill(hidden, 0);
  } else {
    scores = loss_scores(q, k, weights, place);
    if (key_index) hidden = mask_of_index(*key_index, key.sym_size(2)).logical_not();
  }
  if (hidden.defined()) scores = scores.masked_fill(hidden, -kInf);
  const Tensor total = sum.sum(-1, /*keepdim=*/true);
  Tensor rows = total != 0;  // [B, 1, L, 1]; NaN stays, so that the loss says it
  if (layer.kv_lens)
    rows = rows.logical_and(positions_of(query, place) < layer.kv_lens->to(at::kLong).view({-1, 1, 1, 1}));
  const Tensor target = at::where(rows, sum / total, at::zeros({}, sum.options()));
  // A row without keys has no softmax, and no part in the gradient.
  const Tensor difference = target.log() - scores.masked_fill(rows.logical_not(), 0).log_softmax(-1);
  const Tensor terms = at::where(target == 0, at::zeros({}, sum.options()), target * difference);
  return terms.sum() / rows.sum().clamp_min(1);
}

// [B or 1, 1, blocks, 1], how many keys of each block are valid
Tensor keys_of_blocks(const Tensor& key, const SymInt& blocks, const SymInt& block, const PlaceArguments& place) {
  const Tensor starts = (count_from_zero(blocks, key) * block).view_symint({1, 1, blocks, 1});
  const Tensor left = place.kv_lens ? place.kv_lens->to(at::kLong).view({-1, 1, 1, 1}) - starts
                                    : starts.neg() + at::Scalar(key.sym_size(2));
  return left.clamp(at::Scalar(0), at::Scalar(block));
}

void check_block_numbers(const SymInt& block, const SymInt& top_blocks, const SymInt& local_blocks,
                         c10::string_view scorer, bool causal) {
  ATTNPACK_CHECK(scorer == "mean" || scorer == "max", "scorer: got '", scorer, "', want 'mean' or 'max'");
  ATTNPACK_CHECK(block >= 1, "block is ", block, ", wants at least 1 key");
  ATTNPACK_CHECK(top_blocks >= 1, "top_blocks is ", top_blocks, ", wants at least 1");
  ATTNPACK_CHECK(local_blocks >= 0 && local_blocks <= top_blocks, "local_blocks is ", local_blocks, ", wants 0 to ",
                 top_blocks, ", top_blocks");
  ATTNPACK_CHECK(
      scorer == "max" || !causal || local_blocks >= 1,
      "local_blocks is 0 for a causal 'mean', which knows the keys after the query in its own block; want at ",
      "least 1, or take 'max'");
}

void check_block_sums(const Tensor& sums, const Tensor& key, const SymInt& blocks, c10::string_view scorer) {
  check_dense("block_sums", sums);
  ATTNPACK_CHECK(scorer == "mean", "block_sums: got some for scorer '", scorer,
                 "', which reads the keys; leave it out");
  ATTNPACK_CHECK(sums.dim() == 4 && sums.scalar_type() == accumulation_type(key) && sums.device() == key.device() &&
                     sums.sym_size(0) == key.sym_size(0) && sums.sym_size(1) == key.sym_size(1) &&
                     sums.sym_size(2) >= blocks && sums.sym_size(3) == key.sym_size(3),
                 "block_sums has shape ", sums.sym_sizes(), " and dtype ", sums.scalar_type(), " on ", sums.device(),
                 ", wants ", accumulation_type(key), " [", key.sym_size(0), ", ", key.sym_size(1), ", at least ",
                 blocks, ", ", key.sym_size(3), "] on ", key.device());
}

Tensor select_blocks_composite(const Tensor& query, const Tensor& key, SymInt block, SymInt top_blocks,
                               SymInt local_blocks, c10::string_view scorer, const PlaceArguments& place,
                               const std::optional<Tensor>& block_sums) {
  check_query_and_key(query, key, place);
  ATTNPACK_CHECK(query.sym_size(1) % key.sym_size(1) == 0, "key has ", key.sym_size(1),
                 " heads, wants a number that divides the ", query.sym_size(1), " heads of query");
  check_block_numbers(block, top_blocks, local_blocks, scorer, place.causal);
  const SymInt blocks = (key.sym_size(2) + block - 1) / block;
  if (block_sums) check_block_sums(*block_sums, key, blocks, scorer);
  const bool mean = scorer == "mean";
  Tensor scored = key;  // [B, Hkv, blocks or Lkv, D]
  if (mean) {
    const Tensor sums =
        block_sums ? block_sums->narrow_symint(2, 0, blocks) : sum_blocks(key.detach(), blocks, block, place.kv_lens);
    scored = sums / keys_of_blocks(key, blocks, block, place).clamp_min(1);
  }
  const Tensor numbers = count_from_zero(blocks, key);
  const Tensor empty = keys_of_blocks(key, blocks, block, place).transpose(2, 3) == 0;  // [B or 1, 1, 1, blocks]
  const SymInt keys = key.sym_size(2), kv_heads = key.sym_size(1), group = query.sym_size(1) / kv_heads;
  return in_pieces(query, scored.sym_size(2), place, [&](const Tensor& rows, const PlaceArguments& here, int64_t) {
    Tensor scores = key_products(mean ? rows.to(accumulation_type(rows)) : rows, scored), bias;
    if (here.mask) bias = bias_of(*here.mask, kv_heads, keys, scores.scalar_type());
    if (!mean) scores = hide(scores, rows, here);
    scores = scores.unflatten_symint(1, {kv_heads, group});  // [B, Hkv, group, L, blocks or Lkv]
    if (!mean) scores = block_maxima(bias.defined() ? scores + bias.unsqueeze(2) : scores, blocks, block);
    // Summed before anything is hidden: -inf of one head would hide the block from the others, which see the same.
    scores = scores.sum(2);
    const Tensor current = positions_of(rows, here).floor_divide(at::Scalar(block));
    Tensor hidden = here.causal ? empty.logical_or(numbers > current) : empty;
    if (bias.defined()) {
      // A key that the mask leaves, but that lies after the query or in padding, opens no block.
      if (!is_one(bias.sym_size(3))) bias = block_maxima(hide(bias, rows, here), blocks, block);
      if (mean) scores = scores + bias;
      hidden = hidden.logical_or(bias == -kInf);
    }
    scores = scores.masked_fill((numbers <= current).logical_and(numbers > current - at::Scalar(local_blocks)), kInf);
    return best_numbers(scores.masked_fill(hidden, -kInf), top_blocks.min(blocks));
  });
}

PlaceArguments place_arguments(const SelectionPlace& place) {
  return {place.causal, place.q_offsets, place.kv_lens, place.mask};
}

void register_selecting_composites(torch::Library& m) { m.impl("index_keys", from_schema<index_keys_composite>); }

}  // namespace

Tensor select_keys(const Tensor& query, const Tensor& key, const Tensor& weights, int64_t top_k,
                   const SelectionPlace& place, int64_t local_keys) {
  static const DispatchedOp<decltype(select_keys_composite)> op("attnpack::select_keys");
  return op(query, key, weights, top_k, place_arguments(place), local_keys);
}

Tensor index_keys(const IndexerTokens& tokens, int64_t top_k, int64_t local_keys, const LayerInputs& inputs) {
  static const DispatchedOp<decltype(index_keys_composite)> op("attnpack::index_keys");
  LatentCacheArguments cache;
  if (inputs.cache) cache = {inputs.cache->key, inputs.cache->lengths};
  return op(tokens.query, tokens.key, tokens.weights, top_k, local_keys, cache, layer_arguments(inputs), inputs.causal);
}

Tensor indexer_loss(const IndexerTokens& tokens, const Tensor& probabilities, const std::optional<Tensor>& key_index,
                    const LayerInputs& inputs, bool at_names) {
  static const DispatchedOp<decltype(indexer_loss_composite)> op("attnpack::indexer_loss");
  return op(tokens.query, tokens.key, tokens.weights, probabilities, key_index, layer_arguments(inputs), inputs.causal,
            at_names);
}

void check_blocks(const BlockOptions& o, bool causal) {
  check_block_numbers(o.block, o.top_blocks, o.local_blocks, o.scorer, causal);
}

Tensor select_blocks(const Tensor& query, const Tensor& key, const BlockOptions& o, const SelectionPlace& place,
                     const std::optional<Tensor>& block_sums) {
  static const DispatchedOp<decltype(select_blocks_composite)> op("attnpack::select_blocks");
  return op(query, key, o.block, o.top_blocks, o.local_blocks, o.scorer, place_arguments(place), block_sums);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack;
  m.def("select_keys(Tensor query, Tensor key, Tensor weights, SymInt top_k, " ATTNPACK_PLACE_SCHEMA
        ", SymInt local_keys=0) -> Tensor",
        from_schema<select_keys_composite>);
  m.def(
      "index_keys(Tensor query, Tensor key, Tensor weights, SymInt top_k, SymInt "
      "local_keys, " ATTNPACK_LATENT_CACHE_SCHEMA ", " ATTNPACK_LAYER_SCHEMA ", bool causal=False) -> Tensor",
      from_schema<index_keys_composite>);
  m.def(
      "indexer_loss(Tensor query, Tensor key, Tensor weights, Tensor probabilities, Tensor? "
      "key_index, " ATTNPACK_LAYER_SCHEMA ", bool causal=False, bool at_names=False) -> Tensor",
      from_schema<indexer_loss_composite>);
  m.def(
      "select_blocks(Tensor query, Tensor key, SymInt block, SymInt top_blocks, SymInt local_blocks, str "
      "scorer, " ATTNPACK_PLACE_SCHEMA ", Tensor? block_sums=None) -> Tensor",
      from_schema<select_blocks_composite>);
}

// As for `attend`: the schema says that a cache is written, and vmap has no rule for such ops.
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { attnpack::register_selecting_composites(m); }
