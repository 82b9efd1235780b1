#include <attnpack/ops/detail/selected_columns.h>

#include <ATen/ATen.h>

#include <attnpack/ops/detail/attention_arguments.h>

namespace attnpack {

SelectedColumns selected_columns(const Tensor& key_index, int64_t key_block, const c10::SymInt& kv_len) {
  const Tensor index = key_index.to(at::kLong);
  const auto [sorted, order] = index.sort(/*stable=*/std::optional<bool>(true), -1, /*descending=*/false);
  const auto names = index.sym_size(-1);
  const Tensor again =
      names > 1 ? at::constant_pad_nd(sorted.slice_symint(-1, 1) == sorted.narrow_symint(-1, 0, names - 1), {1, 0})
                : at::zeros_like(sorted, at::kBool);
  Tensor counted = at::zeros_like(again).scatter(-1, order, again.logical_not());
  counted = counted & (index >= 0) & (index < count_blocks(kv_len, key_block));
  Tensor keys = index;
  if (key_block > 1) {
    keys = (index.unsqueeze(-1) * key_block + at::arange(key_block, index.options())).flatten(-2);
    counted = counted.unsqueeze(-1).expand_symint({-1, -1, -1, -1, key_block}).flatten(-2) & (keys < kv_len);
  }
  return {keys.masked_fill(counted.logical_not(), 0), counted};
}

Tensor at_columns(const Tensor& x, const Tensor& keys) {
  const auto sizes = x.sym_sizes(), n = keys.sym_sizes();
  if (sizes[3] == 0) return at::zeros_symint({sizes[0], sizes[1], sizes[2], n[3]}, x.options());
  const auto place = [&](int64_t dim) {
    std::vector<c10::SymInt> shape(4, 1);
    shape[dim] = sizes[dim];
    return at::arange(sizes[dim], keys.options()).view_symint(shape);
  };
  return at::index(x, {place(0), place(1), place(2), keys});
}

}  // namespace attnpack
