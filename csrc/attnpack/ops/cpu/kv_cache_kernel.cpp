#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/rope_rows.h>
#include <attnpack/ops/detail/empty_result.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/threads/threads.h>

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

// The place of a sequence's new rows: `count` rows after its first `length` ones, from `slot` of the cache on.
struct NewPlace {
  int64_t length, slot, count;
};
using NewPlaces = c10::SmallVector<NewPlace, 8>;

// The places of all sequences. They are checked before the first write, and read only once, so that the writes cannot
// change them.
NewPlaces find_places(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                      const Tensor& value, const std::optional<Tensor>& new_lens,
                      const std::optional<c10::SymInt>& limit, const std::optional<Tensor>& dropped) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  check_kv_cache_memory(cache_key, cache_value, lengths, key, value);
  const int64_t capacity = cache_key.size(2), all = key.size(2);
  const Tensor counts = new_lens ? new_lens->to(at::kLong).contiguous() : Tensor();
  NewPlaces result;
  for (int64_t b = 0; b < key.size(0); ++b) {
    const int64_t length = lengths.const_data_ptr<int64_t>()[b * lengths.stride(0)];
    const int64_t count = new_lens ? counts.const_data_ptr<int64_t>()[b] : all;
    check_new_len(b, count, all);
    const int64_t gone = dropped ? dropped->const_data_ptr<int64_t>()[b * dropped->stride(0)] : 0;
    ATTNPACK_CHECK(gone >= 0 && gone <= std::max<int64_t>(length, 0), "the cache's dropped[", b, "] is ", gone,
                   ", wants 0 to its length ", length, ": call reset() on the cache");
    check_length(b, length - gone, capacity);
    ATTNPACK_CHECK(
        count <= capacity - (length - gone), "cache is full: sequence ", b, " holds ", length - gone, " of ", capacity,
        " positions and ", count,
        " are to be appended: make a StaticCache with a larger max_len, or crop() or reset() it; a DynamicCache ",
        "grows, but not for two threads at once: give each thread its own");
    ATTNPACK_CHECK(!limit || length + count <= limit->expect_int(), "mask covers ", *limit, " keys, sequence ", b,
                   " has ", length + count, " after the append: with a cache a mask covers all keys, past and new");
    result.push_back({length, length - gone, count});
  }
  return result;
}

void write_lengths(const Tensor& lengths, const NewPlaces& places) {
  for (size_t b = 0; b < places.size(); ++b)
    lengths.mutable_data_ptr<int64_t>()[static_cast<int64_t>(b) * lengths.stride(0)] =
        places[b].length + places[b].count;
}

void kv_cache_append_cpu(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                         const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                         const std::optional<Tensor>& dropped) {
  const NewPlaces places = find_places(cache_key, cache_value, lengths, key, value, new_lens, limit, dropped);
  for (int64_t b = 0; b < key.size(0); ++b) {
    copy_rows(cache_key, key, b, places[b].slot, places[b].count);
    copy_rows(cache_value, value, b, places[b].slot, places[b].count);
  }
  write_lengths(lengths, places);
}

// Rotates the heads of x [B, H, L, D] at token l of sequence b into those of `to` at its row `row`.
template <class T>
void rotate_token(const Tensor& x, int64_t b, int64_t l, const float* cos, const float* sin, int64_t half,
                  bool interleaved, const Tensor& to, int64_t row) {
  const T* from = x.const_data_ptr<T>() + b * x.stride(0) + l * x.stride(2);
  T* target = to.mutable_data_ptr<T>() + b * to.stride(0) + row * to.stride(2);
  for (int64_t h = 0; h < x.size(1); ++h)
    rotate_row<T, float>({from + h * x.stride(1), x.stride(3)}, {cos, 1}, {sin, 1}, half, x.size(3), interleaved,
                         {target + h * to.stride(1), to.stride(3)});
}

Tensor kv_cache_append_rotated_cpu(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                   const Tensor& query, const Tensor& key, const Tensor& value,
                                   at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                   const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                                   const std::optional<Tensor>& dropped) {
  const NewPlaces places = find_places(cache_key, cache_value, lengths, key, value, new_lens, limit, dropped);
  check_rotated(query, key, inv_freq);
  const Tensor rotated = empty_result_like(query);
  const int64_t new_positions = key.size(2), half = static_cast<int64_t>(inv_freq.size());
  const int64_t grain = 16384 / std::max<int64_t>(1, (query.size(1) + key.size(1)) * key.size(3)) + 1;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, key.scalar_type(), "kv_cache_append_rotated_", [&] {
    for_each_range(key.size(0) * new_positions, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = i / new_positions, l = i % new_positions;
        const LastAngles& angles = LastAngles::at(places[b].length + l, inv_freq, factor);
        rotate_token<scalar_t>(query, b, l, angles.cos(), angles.sin(), half, interleaved, rotated, l);
        if (l < places[b].count)
          rotate_token<scalar_t>(key, b, l, angles.cos(), angles.sin(), half, interleaved, cache_key,
                                 places[b].slot + l);
      }
    });
  });
  for (int64_t b = 0; b < key.size(0); ++b) copy_rows(cache_value, value, b, places[b].slot, places[b].count);
  write_lengths(lengths, places);
  return rotated;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("kv_cache_append_", attnpack::kv_cache_append_cpu);
  m.impl("kv_cache_append_rotated_", attnpack::kv_cache_append_rotated_cpu);
}
