#include <attnpack/layers/detail/dropped_keys.h>

#include <ATen/ATen.h>

#include <limits>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/mask_columns.h>
#include <attnpack/ops/detail/unknown_sizes.h>
#include <attnpack/ops/merge_states.h>

namespace attnpack {

using c10::SymInt;

Tensor new_positions(const Tensor& lengths, const SymInt& count) {
  return lengths.view({-1, 1, 1, 1}) + at::arange(count, lengths.options()).unsqueeze(-1);
}

void check_window_fits(const CacheTensors& cache, const AttentionArguments& args) {
  const bool sees_later = !args.causal || args.window[1] > 0;
  ATTNPACK_CHECK(!sees_later && args.window[0] >= 0 && args.window[0] <= cache.window,
                 "cache: got a SlidingWindowCache of window (", cache.window, ", 0) for attention with window (",
                 args.window[0], ", ", args.window[1], ") and causal = ", args.causal ? "true" : "false",
                 ", want causal attention whose window is (left, 0) with 0 <= left <= ", cache.window,
                 "; use a DynamicCache or StaticCache, or make the cache with the module's window");
}

Tensor mask_of_slots(const Tensor& mask, const CacheTensors& cache) {
  const SymInt batch = cache.lengths.sym_size(0), slots = cache.key.sym_size(2);
  if (mask.dim() == 0 || mask.dim() > 4 || mask.sym_size(-1) < 2) return mask;
  Tensor full = mask;
  while (full.dim() < 4) full = full.unsqueeze(0);
  if (!is_one(full.sym_size(0)) && full.sym_size(0) != batch) return mask;  // the operator refuses it
  const SymInt covered = full.sym_size(-1);
  // Slots beyond the mask hold nothing yet, and kv_lens excludes them.
  const Tensor index = positions_of_slots(cache).clamp_max(covered - 1).view_symint({batch, 1, 1, slots});
  const auto sizes = [&](const SymInt& last) -> std::vector<SymInt> {
    return {batch, full.sym_size(1), full.sym_size(2), last};
  };
  return full.expand_symint(sizes(covered)).gather(3, index.expand_symint(sizes(slots)));
}

namespace {

struct FirstKeys {
  Tensor key, value;
  AttentionArguments args;
};

// Key j < keep_first is before the window of the query at position p where j <= p - left - 1: this is causality for
// queries that stand left + 1 positions earlier.
FirstKeys first_keys(const PlacedTokens& tokens, const CacheTensors& cache, AttentionArguments args) {
  const SymInt slots = tokens.key.sym_size(2), count = slots < cache.keep_first ? slots : SymInt(cache.keep_first);
  args.mask = mask_from(args.mask, 0, count);
  args.q_offsets = *tokens.q_offsets + *cache.dropped - (args.window[0] + 1);
  args.kv_lens = tokens.kv_lens->clamp_max(cache.keep_first);
  args.window = kNoWindow;    // a chunk is a mask here
  args.sinks = std::nullopt;  // they join the sum once
  return {tokens.key.narrow_symint(2, 0, count), tokens.value.narrow_symint(2, 0, count), std::move(args)};
}

AttentionResult attend_first(const PlacedTokens& tokens, const CacheTensors& cache, const AttentionArguments& args) {
  const FirstKeys first = first_keys(tokens, cache, args);
  auto [out, lse] = attention_op(tokens.query, first.key, first.value, first.args);
  // These queries stand left + 1 positions earlier, so ALiBi has lowered each score by slope * (left + 1) too little.
  if (args.alibi_slopes) lse = lse - (args.alibi_slopes->to(lse.scalar_type()) * (args.window[0] + 1)).view({-1, 1});
  return {out, lse};
}

}  // namespace

AttentionResult attend_first_and_window(const PlacedTokens& tokens, const CacheTensors& cache,
                                        const AttentionArguments& args) {
  const auto [recent, recent_lse] = attention_op(tokens.query, tokens.key, tokens.value, args);
  if (cache.keep_first == 0) return {recent, recent_lse};
  const auto [first, first_lse] = attend_first(tokens, cache, args);
  return merge_states(recent, recent_lse, first, first_lse);
}

Tensor first_and_window_probabilities(const PlacedTokens& tokens, const CacheTensors& cache,
                                      const AttentionArguments& args) {
  const Tensor recent = scores_formula(tokens.query, tokens.key, args, "probs");
  if (cache.keep_first == 0) return recent;
  const FirstKeys first_part = first_keys(tokens, cache, args);
  const Tensor first = scores_formula(tokens.query, first_part.key, first_part.args, "probs");
  AttentionArguments plain = args;
  plain.dropout_p = 0;
  plain.dropout_seed = std::nullopt;
  const Tensor recent_lse = std::get<1>(attention_op(tokens.query, tokens.key, tokens.value, plain));
  const Tensor first_lse = std::get<1>(attend_first(tokens, cache, plain));
  // The share of each part is the sigmoid of the difference. Two empty parts have none.
  const Tensor share = at::sigmoid(first_lse - recent_lse).nan_to_num(0).unsqueeze(-1).to(recent.scalar_type());
  const Tensor wide = at::constant_pad_nd_symint(first, {0, recent.sym_size(3) - first.sym_size(3)});
  return recent * (1 - share) + wide * share;
}

}  // namespace attnpack
