#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include <attnpack/core/check.h>
#include <attnpack/core/params.h>
#include <attnpack/ops/detail/kv_window.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/kv_cache.h>

namespace attnpack {

using at::Tensor;
using c10::SymInt;

namespace {

void check_window(int64_t window, int64_t keep_first) {
  ATTNPACK_CHECK(window >= 0, "window is ", window, ", wants how many positions before each one it sees, 0 or more");
  ATTNPACK_CHECK(keep_first >= 0, "keep_first is ", keep_first, ", wants 0 or more");
}

void check_sequences(const Tensor& lengths, const Tensor& dropped) {
  ATTNPACK_CHECK(lengths.dim() == 1 && lengths.scalar_type() == at::kLong, "lengths has shape ", lengths.sym_sizes(),
                 " and dtype ", lengths.scalar_type(), ", wants int64 [batch]");
  check_dropped(lengths, dropped);
}

std::tuple<Tensor, Tensor> crop(const Tensor& lengths, const Tensor& dropped, SymInt n, int64_t window,
                                int64_t keep_first) {
  check_window(window, keep_first);
  check_sequences(lengths, dropped);
  ATTNPACK_CHECK(n >= 0, "n is ", n, ", wants how many positions to keep, 0 or more");
  const int64_t kept = n.guard_int(__FILE__, __LINE__);
  const Tensor old_lengths = lengths.cpu().contiguous(), gone = dropped.cpu().contiguous();
  Tensor new_lengths = old_lengths.clone(), new_dropped = gone.clone();
  for (int64_t b = 0; b < old_lengths.numel(); ++b) {
    int64_t& length = new_lengths.mutable_data_ptr<int64_t>()[b];
    int64_t& lost = new_dropped.mutable_data_ptr<int64_t>()[b];
    if (length <= kept) continue;
    // The first position after the dropped ones, and the first that position n sees behind the kept first ones.
    const int64_t first = keep_first + lost, needed = std::max(kept - window, keep_first);
    ATTNPACK_CHECK(lost == 0 || needed >= std::min(first, kept), "n: got ", kept, ", but sequence ", b, " of length ",
                   length, " has dropped the positions ", keep_first, " to ", first - 1, ", and a window of ", window,
                   " before position ", kept, " has some of them; crop to at least ", first + window,
                   ", or reset() and run the sequence again");
    length = kept;
    lost = std::min(lost, std::max<int64_t>(kept - keep_first, 0));
  }
  return {new_lengths.to(lengths.device()), new_dropped.to(lengths.device())};
}

std::tuple<Tensor, Tensor> crop_meta(const Tensor& lengths, const Tensor& dropped, SymInt, int64_t window,
                                     int64_t keep_first) {
  check_window(window, keep_first);
  check_sequences(lengths, dropped);
  return {at::empty_like(lengths), at::empty_like(dropped)};
}

}  // namespace

void check_kv_window_slide(const Tensor& key, const Tensor& value, const Tensor& lengths, const Tensor& dropped,
                           const SymInt& capacity, int64_t window, int64_t keep_first) {
  check_window(window, keep_first);
  check_sequences(lengths, dropped);
  ATTNPACK_CHECK(key.dim() == 4 && value.dim() == 4 && key.sym_sizes().slice(0, 3) == value.sym_sizes().slice(0, 3) &&
                     key.sym_size(0) == lengths.sym_size(0),
                 "key has shape ", key.sym_sizes(), ", value ", value.sym_sizes(), ", lengths ", lengths.sym_sizes(),
                 ", want [batch, num_kv_heads, slots, head_dim], the same but for head_dim, and [batch]");
  ATTNPACK_CHECK(
      key.scalar_type() == value.scalar_type() && key.device() == value.device() && key.device() == lengths.device(),
      "key is ", key.scalar_type(), " on ", key.device(), ", value ", value.scalar_type(), " on ", value.device(),
      ", lengths on ", lengths.device(), ": they must agree");
  ATTNPACK_CHECK(capacity >= 0, "capacity is ", capacity, ", wants 0 or more");
}

Tensor positions_of_slots(const CacheTensors& cache) {
  const Tensor slot = at::arange(cache.key.sym_size(2), cache.lengths.options());
  const Tensor later = slot + cache.dropped->unsqueeze(1);  // [B, slots]
  return cache.keep_first > 0 ? at::where(slot < cache.keep_first, slot, later) : later;
}

Tensor dropped_by_slide(const Tensor& lengths, const Tensor& dropped, int64_t window, int64_t keep_first) {
  const Tensor unneeded = (lengths - window - keep_first).clamp_min(0);
  return at::maximum(dropped, unneeded - unneeded.remainder(kKeyAlignment));
}

std::tuple<Tensor, Tensor, Tensor> kv_window_slide(const Tensor& key, const Tensor& value, const Tensor& lengths,
                                                   const Tensor& dropped, const SymInt& capacity, int64_t window,
                                                   int64_t keep_first) {
  static const DispatchedOp<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                               const Tensor&, SymInt, int64_t, int64_t)>
      op("attnpack::kv_window_slide");
  return op(key, value, lengths, dropped, capacity, window, keep_first);
}

std::tuple<Tensor, Tensor> kv_window_crop(const Tensor& lengths, const Tensor& dropped, const SymInt& n, int64_t window,
                                          int64_t keep_first) {
  static const DispatchedOp<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, SymInt, int64_t, int64_t)> op(
      "attnpack::kv_window_crop");
  return op(lengths, dropped, n, window, keep_first);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def(
      "kv_window_slide(Tensor key, Tensor value, Tensor lengths, Tensor dropped, SymInt capacity, int window, "
      "int keep_first) -> (Tensor, Tensor, Tensor)");
  m.def("kv_window_crop(Tensor lengths, Tensor dropped, SymInt n, int window, int keep_first) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("kv_window_crop", &attnpack::crop); }
TORCH_LIBRARY_IMPL(attnpack, CUDA, m) { m.impl("kv_window_crop", &attnpack::crop); }
TORCH_LIBRARY_IMPL(attnpack, Meta, m) { m.impl("kv_window_crop", &attnpack::crop_meta); }
