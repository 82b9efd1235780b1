#include <attnpack/layers/detail/paged_keys.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/place_tokens.h>
#include <attnpack/ops/detail/varlen_arguments.h>
#include <attnpack/ops/kv_cache_paged.h>

namespace attnpack {

using c10::SymInt;

namespace {

// [B, H, L, D] -> [B * L, H, D]
Tensor rows_of_tokens(const Tensor& x) { return x.transpose(1, 2).flatten(0, 1); }

void check_no_context(const LayerArguments& layer) {
  ATTNPACK_CHECK(!layer.cross, "cache is given together with a context: a cache holds the keys of self-attention");
}

}  // namespace

bool reads_pages(const LayerTokens& tokens, const LayerArguments& layer, const KeyChoice& choice,
                 const ScoreRules& rules) {
  const auto differentiated = [](const Tensor& x) {
    return (at::GradMode::is_enabled() && x.requires_grad()) || x._fw_grad(/*level=*/0).defined();
  };
  return !layer.mask && !choice.names_keys() && rules.dropout_p == 0 && !layer.rope.raw_keys &&
         !differentiated(tokens.query) && !differentiated(tokens.key) && !differentiated(tokens.value) &&
         !(rules.sinks && differentiated(*rules.sinks));
}

Tensor attend_pages(const LayerTokens& tokens, const CacheTensors& cache, const LayerArguments& layer,
                    const ScoreRules& rules) {
  check_no_context(layer);
  const auto& [query, key, value] = tokens;
  check_kv_cache_append_paged(cache.key, cache.value, *cache.block_table, cache.lengths, key, value, layer.kv_lens,
                              std::nullopt);
  ATTNPACK_CHECK(query.dim() == 4 && query.sym_size(0) == key.sym_size(0) && query.sym_size(2) == key.sym_size(2),
                 "query has shape ", query.sym_sizes(), ", key ", key.sym_sizes(), ": batch and length must agree");
  const SymInt batch = query.sym_size(0), length = query.sym_size(2);
  const Tensor ends = at::arange(batch + 1, at::kLong) * length;  // on the CPU: there reading it waits for nothing
  const Tensor past = copy_lengths(cache.lengths);
  VarlenArguments args{rules};
  args.block_table = cache.block_table;
  args.q_offsets = past;
  args.kv_lens = cache.lengths;
  args.max_seqlen_q = length;
  check_attention_varlen(rows_of_tokens(query), cache.key, cache.value, ends, args);  // before anything is written
  const auto [q, k] =
      rotate_tokens({query, key, value}, rope_settings(layer.rope), {layer.positions, false, past, layer.kv_lens});
  kv_cache_append_paged_(cache.key, cache.value, *cache.block_table, cache.lengths, k, value, layer.kv_lens);
  const auto [out, lse] = attention_varlen_op(rows_of_tokens(q), cache.key, cache.value, ends, args);
  return out.unflatten_symint(0, {batch, length}).flatten(2);
}

void through_copy(const LayerTokens& tokens, const CacheTensors& cache, const LayerArguments& layer,
                  c10::function_ref<void(const CacheTensors& copy)> call) {
  check_no_context(layer);
  check_kv_cache_append_paged(cache.key, cache.value, *cache.block_table, cache.lengths, tokens.key, tokens.value,
                              layer.kv_lens, std::nullopt);
  const SymInt added = tokens.key.sym_size(2);
  const SymInt longest = longest_length(cache.lengths, cache.block_table->sym_size(1) * cache.key.sym_size(1));
  const auto copied = [&](const Tensor& pool) {
    return gather_pages(pool, *cache.block_table, cache.lengths, longest + added);
  };
  const CacheTensors copy{copied(cache.key), copied(cache.value), copy_lengths(cache.lengths)};
  call(copy);
  at::NoGradGuard no_grad;
  const Tensor slots = cache.lengths.unsqueeze(1) + at::arange(added, cache.lengths.options());  // [B, L]
  const auto new_rows = [&](const Tensor& x) {
    auto shape = x.sym_sizes().vec();
    shape[2] = added;
    return x.gather(2, slots.unsqueeze(1).unsqueeze(-1).expand_symint(shape));
  };
  kv_cache_append_paged_(cache.key, cache.value, *cache.block_table, cache.lengths, new_rows(copy.key),
                         new_rows(copy.value), layer.kv_lens);
}

}  // namespace attnpack
