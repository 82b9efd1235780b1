#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <algorithm>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/empty_result.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/null.h>

namespace attnpack {

using at::Tensor;

c10::SymInt longest_length(const Tensor& lengths, const c10::SymInt& capacity) {
  check_defined("lengths", lengths);
  if (lengths.sym_numel() == 0) return 0;
  ATTNPACK_CHECK(!lengths.is_meta(), "the cache's lengths are on meta, where they hold no numbers; to ask for its ",
                 "length, make it on a device with memory");
  if (at::isTensorSubclassLike(lengths)) return lengths.max().item().toSymInt();  // torch.compile traces the call
  const Tensor read = lengths.cpu().contiguous();
  int64_t longest = 0;
  for (int64_t b = 0; b < read.numel(); ++b) {
    const int64_t length = read.const_data_ptr<int64_t>()[b];
    check_length(b, length, capacity.guard_int(__FILE__, __LINE__));
    longest = std::max(longest, length);
  }
  return longest;
}

Tensor copy_lengths(const Tensor& lengths) {
  // In a graph an op that a compiler cannot look into: Inductor of torch 2.15 fuses a plain copy with what reads it,
  // and then reads the lengths after an append has changed them.
  if (at::isTensorSubclassLike(lengths)) return null(lengths);
  if (!lengths.is_cpu() || lengths.scalar_type() != at::kLong || !lengths.is_contiguous()) return lengths.clone();
  const Tensor copy = empty_result(lengths.sizes(), lengths.options());
  std::copy_n(lengths.const_data_ptr<int64_t>(), lengths.numel(), copy.mutable_data_ptr<int64_t>());
  return copy;
}

void check_length(int64_t b, int64_t length, int64_t capacity) {
  ATTNPACK_CHECK(length >= 0 && length <= capacity, "the cache's lengths[", b, "] is ", length, ", wants 0 to its ",
                 capacity, " positions: call reset() on the cache");
}

void check_new_lens(const Tensor& new_lens, const c10::SymInt& batch, const char* name) {
  check_defined(name, new_lens);
  ATTNPACK_CHECK(new_lens.dim() == 1 && new_lens.sym_size(0) == batch && is_int32_or_int64(new_lens), name,
                 " has shape ", new_lens.sym_sizes(), " and dtype ", new_lens.scalar_type(),
                 ", wants int32 or int64 [batch] = [", batch, "]: the valid new tokens of each sequence");
}

void check_new_len(int64_t b, int64_t count, int64_t most, const char* name) {
  ATTNPACK_CHECK(count >= 0 && count <= most, name, "[", b, "] is ", count, ", wants 0 to the number of new tokens, ",
                 most);
}

void check_dropped(const Tensor& lengths, const Tensor& dropped) {
  ATTNPACK_CHECK(dropped.sym_sizes() == lengths.sym_sizes() && dropped.scalar_type() == at::kLong &&
                     dropped.device() == lengths.device(),
                 "the cache's dropped has shape ", dropped.sym_sizes(), " and dtype ", dropped.scalar_type(), " on ",
                 dropped.device(), ", wants int64 ", lengths.sym_sizes(), " on ", lengths.device(), " as lengths");
}

void check_kv_cache_append(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                           const Tensor& value, const std::optional<Tensor>& new_lens,
                           const std::optional<Tensor>& dropped) {
  const auto check_one = [](const char* name, const Tensor& cache, const Tensor& x) {
    ATTNPACK_CHECK(x.dim() == 4 && cache.dim() == 4, name, " has shape ", x.sym_sizes(), ", its cache ",
                   cache.sym_sizes(), ", both want [batch, num_kv_heads, length, head_dim]");
    ATTNPACK_CHECK(
        x.sym_size(0) == cache.sym_size(0) && x.sym_size(1) == cache.sym_size(1) && x.sym_size(3) == cache.sym_size(3),
        name, " has shape ", x.sym_sizes(),
        ", the cache holds [batch, num_kv_heads, capacity, head_dim] = ", cache.sym_sizes(),
        ": batch, heads and head_dim must agree; call reset() or make a new cache");
    ATTNPACK_CHECK(x.scalar_type() == cache.scalar_type(), name, " has dtype ", x.scalar_type(), ", the cache ",
                   cache.scalar_type(), ": make the cache in the model's dtype");
    ATTNPACK_CHECK(x.device() == cache.device(), name, " is on ", x.device(), ", the cache on ", cache.device(),
                   ": make the cache on the model's device");
  };
  check_one("key", cache_key, key);
  check_one("value", cache_value, value);
  ATTNPACK_CHECK(key.sym_size(2) == value.sym_size(2) && cache_key.sym_size(2) == cache_value.sym_size(2),
                 "key has length ", key.sym_size(2), ", value ", value.sym_size(2), ", their caches ",
                 cache_key.sym_size(2), " and ", cache_value.sym_size(2), ": they must agree");
  ATTNPACK_CHECK(lengths.dim() == 1 && lengths.sym_size(0) == key.sym_size(0) && lengths.scalar_type() == at::kLong,
                 "the cache's lengths have shape ", lengths.sym_sizes(), " and dtype ", lengths.scalar_type(),
                 ", wants int64 [batch]");
  const auto check_device = [&](const char* name, const Tensor& t) {
    ATTNPACK_CHECK(t.device() == cache_key.device(), name, t.device(), ", the cache on ", cache_key.device(),
                   ": move them there");
  };
  check_device("the cache's values are on ", cache_value);
  check_device("the cache's lengths are on ", lengths);
  if (dropped) check_dropped(lengths, *dropped);
  if (!new_lens) return;
  check_device("kv_lens is on ", *new_lens);
  check_new_lens(*new_lens, key.sym_size(0));
}

namespace {

struct Extent {
  const char *begin, *end;
};

// The memory of a tensor: its first byte, and the byte after its last one.
Extent extent(const Tensor& x) {
  int64_t last = 0;
  for (int64_t i = 0; i < x.dim(); ++i) last += (x.size(i) - 1) * x.stride(i);
  const char* begin = static_cast<const char*>(x.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(x.element_size())};
}

bool extents_overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const Extent x = extent(a), y = extent(b);
  return x.begin < y.end && y.begin < x.end;
}

// Whether two tensors share elements. Two sets of columns of one tensor may alternate in memory, and share no element.
bool share_elements(const Tensor& a, const Tensor& b) {
  return extents_overlap(a, b) &&
         (a.const_data_ptr() == b.const_data_ptr() || at::get_overlap_status(a, b) != at::MemOverlapStatus::TooHard);
}

}  // namespace

void check_kv_cache_memory(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                           const Tensor& value) {
  struct Named {
    const char* name;
    const Tensor& tensor;
  };
  const Named written[] = {{"keys", cache_key}, {"values", cache_value}, {"lengths", lengths}};
  const Named read[] = {{"key", key}, {"value", value}};
  for (const Named& to : written) {
    ATTNPACK_CHECK(to.tensor.numel() == 0 || at::has_internal_overlap(to.tensor) != at::MemOverlap::Yes, "the cache's ",
                   to.name, " have shape ", to.tensor.sizes(), " and strides ", to.tensor.strides(),
                   ", wants memory of its own for each element: call clone() on what expand() gave");
    for (const Named* other = written; other != &to; ++other)
      ATTNPACK_CHECK(!share_elements(to.tensor, other->tensor), "the cache's ", to.name, " share memory with its ",
                     other->name, ", wants tensors of their own: call clone() on one of them");
    for (const Named& from : read)
      ATTNPACK_CHECK(!extents_overlap(to.tensor, from.tensor), from.name, " shares memory with the cache's ", to.name,
                     ", which are written while it is read: call clone() on it");
  }
}

void kv_cache_append_(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                      const Tensor& value, const std::optional<Tensor>& new_lens,
                      const std::optional<c10::SymInt>& limit, const std::optional<Tensor>& dropped) {
  static const DispatchedOp<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                 const std::optional<Tensor>&, std::optional<c10::SymInt>,
                                 const std::optional<Tensor>&)>
      op("attnpack::kv_cache_append_");
  op(cache_key, cache_value, lengths, key, value, new_lens, limit, dropped);
}

void check_rotated(const Tensor& query, const Tensor& key, at::ArrayRef<double> inv_freq) {
  ATTNPACK_CHECK(query.dim() == 4 && query.sym_size(0) == key.sym_size(0) && query.sym_size(2) == key.sym_size(2) &&
                     query.sym_size(3) == key.sym_size(3) && query.scalar_type() == key.scalar_type() &&
                     query.device() == key.device(),
                 "query has shape ", query.sym_sizes(), " and dtype ", query.scalar_type(), ", the new keys ",
                 key.sym_sizes(), " and ", key.scalar_type(), ": batch, length, head_dim and dtype must agree");
  ATTNPACK_CHECK(2 * static_cast<int64_t>(inv_freq.size()) <= key.sym_size(3), "inv_freq has ", inv_freq.size(),
                 " frequencies, wants at most half of head_dim ", key.sym_size(3));
}

Tensor kv_cache_append_rotated_(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                const Tensor& query, const Tensor& key, const Tensor& value,
                                at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                const std::optional<Tensor>& new_lens, const std::optional<c10::SymInt>& limit,
                                const std::optional<Tensor>& dropped) {
  static const DispatchedOp<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor&, at::ArrayRef<double>, double, bool, const std::optional<Tensor>&,
                                   std::optional<c10::SymInt>, const std::optional<Tensor>&)>
      op("attnpack::kv_cache_append_rotated_");
  return op(cache_key, cache_value, lengths, query, key, value, inv_freq, factor, interleaved, new_lens, limit,
            dropped);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def(
      "kv_cache_append_rotated_(Tensor(a!) cache_key, Tensor(b!) cache_value, Tensor(c!) lengths, Tensor query, "
      "Tensor key, Tensor value, float[] inv_freq, float factor, bool interleaved, Tensor? new_lens, SymInt? limit, "
      "Tensor? dropped=None) "
      "-> Tensor");
  m.def(
      "kv_cache_append_(Tensor(a!) cache_key, Tensor(b!) cache_value, Tensor(c!) lengths, Tensor key, Tensor value, "
      "Tensor? new_lens, SymInt? limit, Tensor? dropped=None) -> ()");
}
