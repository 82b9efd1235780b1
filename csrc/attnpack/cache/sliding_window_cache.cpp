#include <attnpack/cache/sliding_window_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>

#include <attnpack/core/check.h>
#include <attnpack/core/params.h>
#include <attnpack/ops/detail/kv_window.h>

namespace attnpack {

using c10::SymInt;

namespace {

void check_options(const SlidingWindowCacheOptions& options) {
  constexpr int64_t kMost = int64_t{1} << 40;  // sums of it do not overflow
  const auto [left, right] = options.window();
  ATTNPACK_CHECK(left >= 0 && left <= kMost && right == 0, "window: got (", left, ", ", right,
                 "), want (left, 0), how many positions before its own each one sees; a DynamicCache keeps them all");
  ATTNPACK_CHECK(options.keep_first() >= 0 && options.keep_first() <= kMost, "keep_first: got ", options.keep_first(),
                 ", want how many first positions stay, 0 or more");
}

}  // namespace

SlidingWindowCache::SlidingWindowCache(const SlidingWindowCacheOptions& options) {
  check_options(options);
  tensors_.window = options.window()[0];
  tensors_.keep_first = options.keep_first();
  reset();
}

SymInt SlidingWindowCache::max_slots_after_slide() const { return keep_first() + window() + kKeyAlignment - 1; }

// Each slide frees slots for the tokens to come. With this many it costs 1 to 3% of the attention between two slides.
SymInt SlidingWindowCache::steady_capacity() const {
  return max_slots_after_slide() + 1 + std::max<int64_t>(64, window() / 16);
}

void SlidingWindowCache::slide(const SymInt& capacity) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto [key, value, dropped] = kv_window_slide(tensors_.key, tensors_.value, tensors_.lengths, *tensors_.dropped,
                                               capacity, window(), keep_first());
  tensors_.key = key;
  tensors_.value = value;
  tensors_.dropped = dropped;
  used_ = std::min(used_, max_slots_after_slide());
}

CacheTensors SlidingWindowCache::reserve(const at::Tensor& key, const at::Tensor& value) {
  check_given(key, value);
  const SymInt added = key.sym_size(2);
  if (used_ == 0) {
    tensors_.key = cache_grown(key, 0, added);
    tensors_.value = cache_grown(value, 0, added);
    tensors_.lengths = cache_zeros({key.sym_size(0)}, key.options().dtype(at::kLong));
    tensors_.dropped = cache_zeros({key.sym_size(0)}, key.options().dtype(at::kLong));
  } else {
    check_fits(tensors_, key, value);
    const SymInt capacity = tensors_.key.sym_size(2), steady = steady_capacity(), need = used_ + added;
    if (need > capacity && need <= steady) {
      const SymInt larger = std::min(steady, std::max(need, capacity * 2));
      tensors_.key = cache_grown(tensors_.key, used_, larger);
      tensors_.value = cache_grown(tensors_.value, used_, larger);
    } else if (need > capacity) {
      slide(std::max(steady, std::min(used_, max_slots_after_slide()) + added));
    }
  }
  CacheTensors room = tensors_;
  room.key = tensors_.key.narrow_symint(2, 0, used_ + added);
  room.value = tensors_.value.narrow_symint(2, 0, used_ + added);
  return room;
}

CacheTensors SlidingWindowCache::reserve_latents(const at::Tensor& latents, int64_t) {
  ATTNPACK_CHECK(false, "cache: got a SlidingWindowCache, want one without a window for latents of shape ",
                 latents.sym_sizes(), "; use a LatentCache, latent attention sees all positions");
}

CacheTensors SlidingWindowCache::shared() const {
  ATTNPACK_CHECK(false,
                 "kv_from: got a SlidingWindowCache, which drops positions that this layer may see; want one that ",
                 "keeps all, as a DynamicCache or StaticCache does");
}

void SlidingWindowCache::commit(const SymInt& new_len, const std::optional<at::Tensor>&) {
  const auto added = new_len.maybe_as_int(), used = used_.maybe_as_int();
  const auto room = tensors_.key.defined() ? tensors_.key.sym_size(2).maybe_as_int() : std::make_optional<int64_t>(0);
  ATTNPACK_CHECK(!added || !used || !room || (*added >= 0 && *used + *added <= *room), "new_len: got ", new_len,
                 " after ", used_, " positions, want what was written into the room that reserve() gave");
  used_ = used_ + new_len;
  if (tensors_.key.defined() && tensors_.key.sym_size(2) > steady_capacity()) slide(steady_capacity());
}

SymInt SlidingWindowCache::sym_len() const {
  return longest_length(tensors_.lengths, std::numeric_limits<int64_t>::max());
}

SymInt SlidingWindowCache::sym_stored() const {
  if (!tensors_.key.defined()) return 0;
  return longest_length(tensors_.lengths - *tensors_.dropped, tensors_.key.sym_size(2));
}

SymInt SlidingWindowCache::sym_nbytes() const {
  return tensors_.key.defined() ? bytes_of_position(tensors_) * sym_stored() : SymInt(0);
}

void SlidingWindowCache::reset() {
  tensors_.key = tensors_.value = at::Tensor();
  tensors_.lengths = cache_zeros({0}, at::kLong);
  tensors_.dropped = std::nullopt;
  used_ = 0;
}

void SlidingWindowCache::crop(const SymInt& n) {
  check_crop(n);
  if (n == 0) return reset();
  if (!tensors_.key.defined()) return;
  c10::InferenceMode normal(false);
  auto [lengths, dropped] = kv_window_crop(tensors_.lengths, *tensors_.dropped, n, window(), keep_first());
  tensors_.lengths = lengths;
  tensors_.dropped = dropped;
  used_ = std::min(used_, n);
}

void SlidingWindowCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  if (!tensors_.key.defined()) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (auto* tensor : {&tensors_.key, &tensors_.value, &tensors_.lengths, &*tensors_.dropped}) {
    *tensor = tensor->index_select(0, rows);
  }
}

void SlidingWindowCache::check_state() const {
  KVCache::check_state();
  check_options(SlidingWindowCacheOptions(window()).keep_first(keep_first()));
  ATTNPACK_CHECK(tensors_.key.defined() == tensors_.dropped.has_value(), "tensors: got ",
                 tensors_.dropped ? "dropped without key" : "key without dropped", ", want both or none");
}

}  // namespace attnpack
