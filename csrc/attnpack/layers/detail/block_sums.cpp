#include <attnpack/layers/detail/block_sums.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <vector>

#include <attnpack/ops/detail/layout.h>

namespace attnpack {

namespace {

using at::Tensor;
using c10::SymInt;

Tensor by_sequence(const Tensor& numbers) { return numbers.to(at::kLong).view({-1, 1, 1, 1}); }

// The sums of `blocks` blocks of each sequence from block first [B, 1, 1, 1] on, of the keys before ends [B, 1, 1, 1]:
// [B, Hkv, blocks, D].
Tensor sums_from(const Tensor& key, const Tensor& first, const Tensor& ends, const SymInt& blocks,
                 const SymInt& block) {
  const SymInt keys = key.sym_size(2), rows = blocks * block;
  const Tensor slots =
      first * at::Scalar(block) + count_from_zero(rows, key).view_symint({1, 1, rows, 1});  // [B, 1, rows, 1]
  const std::vector<SymInt> sizes{key.sym_size(0), key.sym_size(1), rows, key.sym_size(3)};
  const Tensor last_keys =
      key.gather(2, slots.clamp_max(at::Scalar(keys - 1)).expand_symint(sizes)).to(accumulation_type(key));
  return last_keys.masked_fill(slots >= ends.clamp_max(at::Scalar(keys)), 0)
      .unflatten_symint(2, {blocks, block})
      .sum(3);
}

std::vector<SymInt> sizes_of(const Tensor& key, const SymInt& blocks) {
  return {key.sym_size(0), key.sym_size(1), blocks, key.sym_size(3)};
}

}  // namespace

Tensor sum_blocks(const Tensor& key, const SymInt& blocks, const SymInt& block, const std::optional<Tensor>& kv_lens) {
  const auto wide = accumulation_type(key);
  const SymInt keys = key.sym_size(2), whole = keys / block;
  const Tensor front = key.narrow_symint(2, 0, whole * block).unflatten_symint(2, {whole, block}).sum(3, false, wide);
  const Tensor back = key.narrow_symint(2, whole * block, keys - whole * block).sum(2, /*keepdim=*/true, wide);
  // Not narrow: a graph for any length would be bound to lengths with an unfinished block, or to those without.
  const Tensor sums = at::cat({front, back}, 2).index_select(2, count_from_zero(blocks, key));
  if (!kv_lens || blocks == 0) return sums;
  const Tensor ends = by_sequence(*kv_lens);
  const Tensor last = ends.floor_divide(at::Scalar(block)).clamp(at::Scalar(0), at::Scalar(blocks - 1));
  return sums.scatter(2, last.expand_symint(sizes_of(key, 1)), sums_from(key, last, ends, 1, block));
}

void update_block_sums(const Tensor& sums, const Tensor& key, const Tensor& past, const Tensor& lengths,
                       const SymInt& new_len, const SymInt& block) {
  if (new_len == 0 || key.sym_size(2) == 0) return;
  const at::NoGradGuard no_grad;
  const SymInt reached = (new_len + block - 2) / block + 1;  // the most blocks that new_len positions lie in
  const Tensor first = by_sequence(past).floor_divide(at::Scalar(block));
  const Tensor made = sums_from(key.detach(), first, by_sequence(lengths), reached, block);
  const Tensor places = first + count_from_zero(reached, key).view_symint({1, 1, reached, 1});
  sums.scatter_(2, places.expand_symint(sizes_of(key, reached)), made);
}

}  // namespace attnpack
