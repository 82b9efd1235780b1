#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/kv_window.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

using at::Tensor;

// Copies slots [0, first) and [moved + first, slots) of each head of `from` to the front of `to`.
void copy_kept(const Tensor& from, const Tensor& to, const int64_t* slots, const int64_t* moved, int64_t keep_first) {
  const int64_t heads = from.size(1), row = from.size(3) * static_cast<int64_t>(from.element_size());
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, to.size(2) * row));
  for_each_range(from.size(0) * heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / heads, first = std::min(keep_first, slots[b]), rest = slots[b] - moved[b] - first;
      const char* head = source + i * from.size(2) * row;
      char* to_head = target + i * to.size(2) * row;
      std::memcpy(to_head, head, first * row);
      std::memcpy(to_head + first * row, head + (first + moved[b]) * row, rest * row);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> kv_window_slide_cpu(const Tensor& key, const Tensor& value, const Tensor& lengths,
                                                       const Tensor& dropped, c10::SymInt capacity, int64_t window,
                                                       int64_t keep_first) {
  check_kv_window_slide(key, value, lengths, dropped, capacity, window, keep_first);
  const int64_t room = capacity.expect_int();
  const Tensor new_dropped = dropped_by_slide(lengths, dropped, window, keep_first);
  const Tensor slots = (lengths - dropped).contiguous(), moved = (new_dropped - dropped).contiguous();
  const auto* stored = slots.const_data_ptr<int64_t>();
  const auto* by = moved.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < slots.numel(); ++b) {
    check_length(b, stored[b], key.size(2));
    ATTNPACK_CHECK(stored[b] - by[b] >= std::min(keep_first, stored[b]), "the cache's dropped[", b, "] is ",
                   stored[b] - by[b], " slots short: call reset() on the cache");
    ATTNPACK_CHECK(stored[b] - by[b] <= room, "capacity is ", room, ", wants at least ", stored[b] - by[b],
                   ", the positions that sequence ", b, " keeps");
  }
  const auto slid = [&](const Tensor& x) {
    const Tensor result = at::zeros({x.size(0), x.size(1), room, x.size(3)}, x.options());
    copy_kept(x.contiguous(), result, stored, by, keep_first);
    return result;
  };
  return {slid(key), slid(value), new_dropped};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("kv_window_slide", attnpack::kv_window_slide_cpu); }
