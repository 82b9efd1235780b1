#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/detail/kv_window.h>

namespace attnpack {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> kv_window_slide_meta(const Tensor& key, const Tensor& value, const Tensor& lengths,
                                                        const Tensor& dropped, c10::SymInt capacity, int64_t window,
                                                        int64_t keep_first) {
  check_kv_window_slide(key, value, lengths, dropped, capacity, window, keep_first);
  const auto slid = [&](const Tensor& x) {
    return at::empty_symint({x.sym_size(0), x.sym_size(1), capacity, x.sym_size(3)}, x.options());
  };
  return {slid(key), slid(value), at::empty_like(lengths)};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) { m.impl("kv_window_slide", attnpack::kv_window_slide_meta); }
