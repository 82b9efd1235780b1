#include <attnpack/layers/detail/place_tokens.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/core/padded.h>
#include <attnpack/layers/detail/dropped_keys.h>
#include <attnpack/layers/detail/mask_columns.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/ops/kv_cache.h>

namespace attnpack {
namespace {

using c10::SymInt;

// The part of the cache that attention may read: all of it, or its first positions if a mask covers fewer. A mask over
// a cache that drops positions covers the dropped ones too.
struct ReadableCache {
  Tensor key, value;
  std::optional<SymInt> limit;
};

ReadableCache readable_under(const CacheTensors& cache, const std::optional<Tensor>& mask) {
  ReadableCache readable{cache.key, cache.value, std::nullopt};
  if (!covers_positions(mask)) return readable;
  if (cache.dropped) {
    readable.limit = mask->sym_size(-1);
  } else if (mask->sym_size(-1) < cache.key.sym_size(2)) {
    readable.limit = mask->sym_size(-1);
    readable.key = cache.key.narrow_symint(2, 0, *readable.limit);
    readable.value = cache.value.narrow_symint(2, 0, *readable.limit);
  }
  return readable;
}

// Whether the cache may rotate the keys that it takes: all dims rotate, the tensors are plain numbers on the CPU
// or on CUDA without gradients, and each token's position is one more than that of the token before it.
bool rotates_in_cache(const NewTokens& tokens, const RopeSettings& rope, const std::optional<Tensor>& positions) {
  return !tokens.rotated_dims && (tokens.query.is_cpu() || tokens.query.is_cuda()) && !at::GradMode::is_enabled() &&
         !positions && !rope.by_length() && !rope.raw_keys &&
         !at::areAnyTensorSubclassLike({tokens.query, tokens.key, tokens.value}) &&
         !tokens.query._fw_grad(/*level=*/0).defined();
}

// The dims of x that do not rotate, and those that do.
std::pair<Tensor, Tensor> split_dims(const Tensor& x, const SymInt& rotated_dims) {
  const SymInt fixed = x.sym_size(3) - rotated_dims;
  return {x.narrow_symint(3, 0, fixed), x.narrow_symint(3, fixed, rotated_dims)};
}

// The cache's keys at their positions: rotated now if the cache holds them unrotated.
Tensor rotate_stored(const Tensor& key, const CacheTensors& cache, const Tensor& lengths, const RopeSettings& rope,
                     const std::optional<SymInt>& rotated_dims) {
  if (!rope.raw_keys) return key;
  std::optional<Tensor> positions;
  if (cache.dropped) positions = positions_of_slots(cache);
  if (!rotated_dims) return rotate_cached(key, lengths, rope, positions);
  const auto [fixed, raw] = split_dims(key, *rotated_dims);
  return at::cat({fixed, rotate_cached(raw, lengths, rope, positions)}, -1);
}

// For queries over a cache that has their tokens already. No number is read of tensors elsewhere than on the CPU,
// because that would wait for the device.
void check_shared_lengths(const Tensor& query, const Tensor& lengths, const std::optional<Tensor>& new_lens) {
  ATTNPACK_CHECK(lengths.dim() == 1 && lengths.scalar_type() == at::kLong && lengths.sym_size(0) == query.sym_size(0),
                 "lengths has shape ", lengths.sym_sizes(), " and dtype ", lengths.scalar_type(),
                 ", wants int64 [batch] = [", query.sym_size(0), "]");
  if (!new_lens) return;
  check_new_lens(*new_lens, query.sym_size(0));
  if (!new_lens->is_cpu() || at::isTensorSubclassLike(*new_lens)) return;
  const Tensor counts = new_lens->to(at::kLong).contiguous();
  for (int64_t b = 0; b < counts.numel(); ++b) check_new_len(b, counts.const_data_ptr<int64_t>()[b], query.size(2));
}

}  // namespace

Tensor with_new_rows(const Tensor& cache, const Tensor& rows, const Tensor& past,
                     const std::optional<Tensor>& new_lens) {
  const SymInt capacity = cache.sym_size(2);
  const Tensor step = at::arange(rows.sym_size(2), past.options());
  Tensor target = past.unsqueeze(-1) + step;  // [B, L]
  // Rows that are not valid go to slots after the end. These slots are cut off again.
  if (new_lens) target = at::where(step < new_lens->to(at::kLong).unsqueeze(-1), target, step + capacity);
  const Tensor padded = at::constant_pad_nd_symint(cache.detach(), {0, 0, 0, rows.sym_size(2)});
  const Tensor index = target.unsqueeze(1).unsqueeze(-1).expand_symint(rows.sym_sizes());
  return padded.scatter(2, index, rows).narrow_symint(2, 0, capacity);
}

namespace {

// Where tokens without a cache stand, if they are a part of a sequence that is sharded over processes.
Placement shard_placement(const ShardedAttention& over, const NewTokens& tokens, Placement place) {
  const auto device = tokens.query.device();
  if (!place.positions) place.positions = over.positions(tokens.query.size(2)).to(device);
  if (place.cross && !place.keys_at) place.keys_at = over.positions(tokens.key.size(2)).to(device);
  return place;
}

}  // namespace

std::tuple<Tensor, Tensor> rotate_tokens(const NewTokens& tokens, const std::optional<RopeSettings>& rope,
                                         const Placement& given) {
  check_defined("query", tokens.query);
  check_defined("key", tokens.key);
  std::optional<Placement> part;
  if (const auto* over = sharded_attention(); over && rope && !given.past) part = shard_placement(*over, tokens, given);
  const Placement& place = part ? *part : given;
  check_positions(place.positions, tokens.query);  // also if nothing rotates
  if (!rope) return {tokens.query, tokens.key};
  if (!tokens.rotated_dims) return rotate_new(tokens.query, tokens.key, *rope, place);
  const auto [fixed_q, raw_q] = split_dims(tokens.query, *tokens.rotated_dims);
  const auto [fixed_k, raw_k] = split_dims(tokens.key, *tokens.rotated_dims);
  const auto [q, k] = rotate_new(raw_q, raw_k, *rope, place);
  return {at::cat({fixed_q, q}, -1), at::cat({fixed_k, k}, -1)};
}

PlacedTokens place_tokens(
    const NewTokens& tokens, const std::optional<CacheTensors>& cache, const LayerArguments& args,
    c10::function_ref<void(const Tensor& key, const Tensor& value, const std::optional<Tensor>& kv_lens)> check) {
  std::optional<RopeSettings> rope = rope_settings(args.rope);
  if (tokens.rotated_dims && *tokens.rotated_dims == 0) rope.reset();
  if (!cache) {
    // Elsewhere the operator's own check comes before anything is done with the tokens. (Latents are cut by kv_lens.)
    if (rope || (tokens.rotated_dims && args.kv_lens)) check(tokens.key, tokens.value, args.kv_lens);
    const auto [q, k] = rotate_tokens(tokens, rope, {args.positions, args.cross, std::nullopt, args.kv_lens});
    return {q, k, tokens.value, std::nullopt, args.kv_lens};
  }
  ATTNPACK_CHECK(!args.cross, "cache is given together with a context: a cache holds the keys of self-attention");
  check_kv_cache_append(cache->key, cache->value, cache->lengths, tokens.key, tokens.value, args.kv_lens,
                        cache->dropped);
  ReadableCache readable = readable_under(*cache, args.mask);
  check(readable.key, readable.value, std::nullopt);
  const auto slots = [&](const Tensor& lengths) { return cache->dropped ? lengths - *cache->dropped : lengths; };
  const Tensor past = copy_lengths(cache->lengths);
  if (rope && rotates_in_cache(tokens, *rope, args.positions)) {
    const Tensor q = kv_cache_append_rotated_(cache->key, cache->value, cache->lengths, tokens.query, tokens.key,
                                              tokens.value, rope->inv_freq, rope->factor, rope->interleaved,
                                              args.kv_lens, readable.limit, cache->dropped);
    return {q, readable.key, readable.value, slots(past), slots(cache->lengths), true};
  }
  const auto [q, k] = rotate_tokens(tokens, rope, {args.positions, false, past, args.kv_lens});
  kv_cache_append_(cache->key, cache->value, cache->lengths, k, tokens.value, args.kv_lens, readable.limit,
                   cache->dropped);
  // A copy too where the gradients of queries or mask read the keys later: the next append writes the cache.
  const bool mask_trains = args.mask && args.mask->requires_grad();
  if (at::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || tokens.value.requires_grad() || mask_trains)) {
    readable.key = with_new_rows(readable.key, k, slots(past), args.kv_lens);
    readable.value = with_new_rows(readable.value, tokens.value, slots(past), args.kv_lens);
  }
  const Tensor lengths = copy_lengths(cache->lengths);
  if (rope) readable.key = rotate_stored(readable.key, *cache, lengths, *rope, tokens.rotated_dims);
  return {q, readable.key, readable.value, slots(past), slots(lengths), true};
}

PlacedTokens place_queries(const Tensor& query, const CacheTensors& cache, const LayerArguments& args,
                           c10::function_ref<void(const Tensor& key, const Tensor& value)> check) {
  ATTNPACK_CHECK(!args.cross, "kv_from is given together with a context: leave one of them out");
  const auto rope = rope_settings(args.rope);
  const ReadableCache readable = readable_under(cache, args.mask);
  check(readable.key, readable.value);
  check_shared_lengths(query, cache.lengths, args.kv_lens);
  const Tensor counted =
      args.kv_lens ? args.kv_lens->to(at::kLong) : at::ones_symint({query.sym_size(2)}, cache.lengths.options()).sum();
  const Tensor past = cache.lengths - counted, lengths = copy_lengths(cache.lengths);
  const Tensor no_keys = query.narrow(1, 0, 0);
  const Tensor q =
      std::get<0>(rotate_tokens({query, no_keys, no_keys}, rope, {args.positions, false, past, args.kv_lens}));
  const Tensor key = rope ? rotate_stored(readable.key, cache, lengths, *rope, std::nullopt) : readable.key;
  return {q, key, readable.value, past, lengths, true};
}

Tensor as_if_exact(const Tensor& x, const Tensor& rounded) { return x + (rounded - x).detach(); }

void trim_to_longest(PlacedTokens& tokens, const std::optional<Tensor>& mask) {
  if (!tokens.cached || mask || at::isTensorSubclassLike(*tokens.kv_lens) || tokens.kv_lens->numel() == 0) return;
  const int64_t longest = tokens.kv_lens->max().item<int64_t>();
  tokens.key = tokens.key.narrow(2, 0, longest);
  tokens.value = tokens.value.narrow(2, 0, longest);
}

}  // namespace attnpack
