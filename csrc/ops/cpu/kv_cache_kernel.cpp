#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstring>

#include <attnpack/core/check.h>
#include <attnpack/ops/kv_cache.h>

namespace attnpack {
namespace {

using at::Tensor;

// x[b, :, :count] -> cache[b, :, position : position + count].
void copy_rows(const Tensor& cache, const Tensor& x, int64_t b, int64_t position, int64_t count) {
  if (x.stride(3) != 1 || cache.stride(3) != 1) {
    cache.select(0, b).narrow(1, position, count).copy_(x.select(0, b).narrow(1, 0, count));
    return;
  }
  const int64_t bytes = x.element_size();
  const char* from = static_cast<const char*>(x.const_data_ptr()) + b * x.stride(0) * bytes;
  char* to = static_cast<char*>(cache.mutable_data_ptr()) + b * cache.stride(0) * bytes;
  for (int64_t h = 0; h < x.size(1); ++h)
    for (int64_t l = 0; l < count; ++l)
      std::memcpy(to + (h * cache.stride(1) + (position + l) * cache.stride(2)) * bytes,
                  from + (h * x.stride(1) + l * x.stride(2)) * bytes, x.size(3) * bytes);
}

void kv_cache_append_cpu(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                         const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens);
  const int64_t batch = key.size(0), new_positions = key.size(2), capacity = cache_key.size(2);
  const int64_t most = limit ? limit->expect_int() : capacity;
  const Tensor counts = new_lens ? new_lens->to(at::kLong).contiguous() : Tensor();
  const auto count = [&](int64_t b) { return new_lens ? counts.const_data_ptr<int64_t>()[b] : new_positions; };
  int64_t* length = lengths.mutable_data_ptr<int64_t>();
  const int64_t step = lengths.stride(0);
  for (int64_t b = 0; b < batch; ++b) {
    ATTNPACK_CHECK(count(b) >= 0 && count(b) <= new_positions, "kv_lens[", b, "] is ", count(b),
                   ", wants 0 to the number of new tokens, ", new_positions);
    ATTNPACK_CHECK(length[b * step] >= 0 && length[b * step] + count(b) <= capacity, "cache is full: sequence ", b,
                   " holds ", length[b * step], " of ", capacity, " positions and ", count(b),
                   " are to be appended: make it with a larger max_len, or crop() or reset() it");
    ATTNPACK_CHECK(length[b * step] + count(b) <= most, "mask covers ", most, " keys, sequence ", b, " has ",
                   length[b * step] + count(b), " after the append: with a cache a mask covers all keys, past and new");
  }
  for (int64_t b = 0; b < batch; ++b) {
    copy_rows(cache_key, key, b, length[b * step], count(b));
    copy_rows(cache_value, value, b, length[b * step], count(b));
    length[b * step] += count(b);
  }
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("kv_cache_append_", attnpack::kv_cache_append_cpu); }
