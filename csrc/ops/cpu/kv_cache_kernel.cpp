#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/rope_rows.h>
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

// Where the new rows of each sequence go: checked for all of them before the first write.
class Places {
 public:
  Places(const Tensor& lengths, const Tensor& key, const std::optional<Tensor>& new_lens, int64_t capacity,
         int64_t most)
      : length_(lengths.mutable_data_ptr<int64_t>()),
        step_(lengths.stride(0)),
        all_(key.size(2)),
        counts_(new_lens ? new_lens->to(at::kLong).contiguous() : Tensor()) {
    for (int64_t b = 0; b < key.size(0); ++b) {
      ATTNPACK_CHECK(count(b) >= 0 && count(b) <= all_, "kv_lens[", b, "] is ", count(b),
                     ", wants 0 to the number of new tokens, ", all_);
      ATTNPACK_CHECK(length(b) >= 0 && length(b) + count(b) <= capacity, "cache is full: sequence ", b, " holds ",
                     length(b), " of ", capacity, " positions and ", count(b),
                     " are to be appended: make it with a larger max_len, or crop() or reset() it");
      ATTNPACK_CHECK(length(b) + count(b) <= most, "mask covers ", most, " keys, sequence ", b, " has ",
                     length(b) + count(b), " after the append: with a cache a mask covers all keys, past and new");
    }
  }
  int64_t& length(int64_t b) const { return length_[b * step_]; }  // so far
  int64_t count(int64_t b) const { return counts_.defined() ? counts_.const_data_ptr<int64_t>()[b] : all_; }

 private:
  int64_t* length_;
  int64_t step_, all_;
  Tensor counts_;
};

Places places(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
              const Tensor& value, const std::optional<Tensor>& new_lens, const std::optional<c10::SymInt>& limit) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens);
  const int64_t capacity = cache_key.size(2);
  return {lengths, key, new_lens, capacity, limit ? limit->expect_int() : capacity};
}

void kv_cache_append_cpu(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                         const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit) {
  const Places at = places(cache_key, cache_value, lengths, key, value, new_lens, limit);
  for (int64_t b = 0; b < key.size(0); ++b) {
    copy_rows(cache_key, key, b, at.length(b), at.count(b));
    copy_rows(cache_value, value, b, at.length(b), at.count(b));
    at.length(b) += at.count(b);
  }
}

// The heads of x [B, H, L, D] at token l of sequence b, rotated, go to those of `to` at token `position`.
template <class T>
void rotate_token(const Tensor& x, int64_t b, int64_t l, const float* cos, const float* sin, int64_t half,
                  bool interleaved, const Tensor& to, int64_t position) {
  const T* from = x.const_data_ptr<T>() + b * x.stride(0) + l * x.stride(2);
  T* target = to.mutable_data_ptr<T>() + b * to.stride(0) + position * to.stride(2);
  for (int64_t h = 0; h < x.size(1); ++h)
    rotate_row<T, float>({from + h * x.stride(1), x.stride(3)}, {cos, 1}, {sin, 1}, half, x.size(3), interleaved,
                         {target + h * to.stride(1), to.stride(3)});
}

Tensor kv_cache_append_rotated_cpu(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                   const Tensor& query, const Tensor& key, const Tensor& value,
                                   at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                   const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit) {
  const Places at = places(cache_key, cache_value, lengths, key, value, new_lens, limit);
  check_rotated(query, key, inv_freq);
  const Tensor rotated = at::empty_like(query);
  const int64_t new_positions = key.size(2), half = static_cast<int64_t>(inv_freq.size());
  const int64_t grain = 16384 / std::max<int64_t>(1, (query.size(1) + key.size(1)) * key.size(3)) + 1;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, key.scalar_type(), "kv_cache_append_rotated_", [&] {
    at::parallel_for(0, key.size(0) * new_positions, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> cos(half), sin(half);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = i / new_positions, l = i % new_positions, position = at.length(b) + l;
        fill_angles(position, inv_freq, factor, cos.data(), sin.data());
        rotate_token<scalar_t>(query, b, l, cos.data(), sin.data(), half, interleaved, rotated, l);
        if (l < at.count(b))
          rotate_token<scalar_t>(key, b, l, cos.data(), sin.data(), half, interleaved, cache_key, position);
      }
    });
  });
  for (int64_t b = 0; b < key.size(0); ++b) {
    copy_rows(cache_value, value, b, at.length(b), at.count(b));
    at.length(b) += at.count(b);
  }
  return rotated;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("kv_cache_append_", attnpack::kv_cache_append_cpu);
  m.impl("kv_cache_append_rotated_", attnpack::kv_cache_append_rotated_cpu);
}
