#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/detail/kv_window.h>

namespace attnpack {

std::tuple<Tensor, Tensor, Tensor> kv_window_slide_composed(const Tensor& key, const Tensor& value,
                                                            const Tensor& lengths, const Tensor& dropped,
                                                            c10::SymInt capacity, int64_t window, int64_t keep_first) {
  check_kv_window_slide(key, value, lengths, dropped, capacity, window, keep_first);
  const Tensor new_dropped = dropped_by_slide(lengths, dropped, window, keep_first);
  const Tensor slot = at::arange(capacity.expect_int(), lengths.options());  // [capacity]
  const Tensor moved = (new_dropped - dropped).unsqueeze(1);                 // [B, 1]
  const Tensor source = at::where(slot < keep_first, slot, slot + moved);    // [B, capacity]
  const Tensor kept = slot < (lengths - new_dropped).unsqueeze(1);           // [B, capacity]
  const auto slid = [&](const Tensor& x) {
    const Tensor index = source.clamp(0, std::max<int64_t>(x.size(2) - 1, 0)).unsqueeze(1).unsqueeze(-1);
    const Tensor rows = x.gather(2, index.expand({x.size(0), x.size(1), slot.size(0), x.size(3)}));
    return at::where(kept.unsqueeze(1).unsqueeze(-1), rows, at::zeros({}, x.options()));
  };
  return {slid(key), slid(value), new_dropped};
}

}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) { m.impl("kv_window_slide", attnpack::kv_window_slide_composed); }
