#include <attnpack/cache/quantized_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/kv_window.h>
#include <attnpack/ops/detail/latent_rows.h>
#include <attnpack/ops/quantize.h>

namespace attnpack {

using c10::SymInt;

namespace {

void check_options(const QuantizedCacheOptions& o) {
  constexpr int64_t kMost = int64_t{1} << 40;
  ATTNPACK_CHECK(o.bits() == 8 || o.bits() == 4, "bits: got ", o.bits(),
                 ", want 8 or 4; a DynamicCache holds 16 or 32");
  ATTNPACK_CHECK(o.exact_first() >= 0 && o.exact_first() <= kMost, "exact_first: got ", o.exact_first(),
                 ", want how many first positions are exact, 0 or more");
  ATTNPACK_CHECK(o.exact_last() >= 0 && o.exact_last() <= kMost, "exact_last: got ", o.exact_last(),
                 ", want how many last positions are exact, 0 or more");
}

// A position sees itself beside those before it.
int64_t exact_window(const QuantizedCacheOptions& o) { return std::max<int64_t>(o.exact_last() - 1, 0); }

SlidingWindowCache exact_cache(const QuantizedCacheOptions& o) {
  check_options(o);
  return SlidingWindowCache(SlidingWindowCacheOptions(exact_window(o)).keep_first(o.exact_first()));
}

// A tensor that has the shape of x's rows, of that many bytes each, without memory for them.
at::Tensor row_shape(const at::Tensor& x, const SymInt& bytes) {
  return at::empty_symint({bytes}, x.options().dtype(at::kByte).requires_grad(false))
      .expand_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), bytes});
}

}  // namespace

QuantizedCache::QuantizedCache(const QuantizedCacheOptions& options)
    : options_(options), exact_(exact_cache(options)) {}

void QuantizedCache::check_stored(const at::Tensor& key, const at::Tensor& value, int64_t kv_lora_rank) {
  ATTNPACK_CHECK(key.dim() == 4 && value.dim() == 4, "cache: got keys of shape ", key.sym_sizes(), " and values of ",
                 value.sym_sizes(), ", want [batch, num_kv_heads, L, head_dim] each");
  ATTNPACK_CHECK(at::isFloatingType(key.scalar_type()) && value.scalar_type() == key.scalar_type(),
                 "cache: got keys in ", key.scalar_type(), " and values in ", value.scalar_type(),
                 ", want one float dtype, which a QuantizedCache quantises");
  if (sym_len() == 0) {
    head_dim_ = key.sym_size(3);
    v_head_dim_ = value.sym_size(3);
    kv_lora_rank_ = kv_lora_rank;
    dtype_ = static_cast<int64_t>(key.scalar_type());
    return;
  }
  ATTNPACK_CHECK(kv_lora_rank == kv_lora_rank_, "cache: got ", kv_lora_rank ? "latents" : "keys and values",
                 " of kv_lora_rank ", kv_lora_rank, ", want ", kv_lora_rank_,
                 " as the cache holds (0: keys and values); use a cache of this layer's shape, or reset() it");
  const auto shape_of = [&](const at::Tensor& rows, const SymInt& dim) {
    return at::empty_symint({rows.sym_size(0), rows.sym_size(1), 0, dim}, rows.options().dtype(dtype()));
  };
  check_fits({shape_of(tensors_.key, head_dim_), shape_of(tensors_.value, v_head_dim_), tensors_.lengths}, key, value);
}

CacheTensors QuantizedCache::reserve(const at::Tensor& key, const at::Tensor& value) {
  check_given(key, value);
  check_stored(key, value, /*kv_lora_rank=*/0);
  const auto bytes = [&](const at::Tensor& x) { return sym_quantized_row_bytes(bits(), x.sym_size(3)); };
  auto room = DynamicCache::reserve(row_shape(key, bytes(key)), row_shape(value, bytes(value)));
  room.bits = bits();
  if (!keeps_exact()) return room;
  const auto exact = exact_.reserve(key, value);
  share_lengths();
  room.exact_key = exact.key;
  room.exact_value = exact.value;
  room.dropped = exact.dropped;
  room.window = exact_last() - 1;
  room.keep_first = exact_first();
  return room;
}

CacheTensors QuantizedCache::reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) {
  ATTNPACK_CHECK(bits() == kLatentBits && !keeps_exact(), "cache: got a QuantizedCache with bits = ", bits(),
                 ", exact_first = ", exact_first(), " and exact_last = ", exact_last(),
                 " for latents, want bits = 8 without exact positions, or a LatentCache");
  check_defined("latents", latents);
  ATTNPACK_CHECK(latents.dim() == 4 && kv_lora_rank > 0 && latents.sym_size(3) >= kv_lora_rank,
                 "cache: got latents of shape ", latents.sym_sizes(), " and kv_lora_rank ", kv_lora_rank,
                 ", want [batch, 1, L, kv_lora_rank + qk_rope_head_dim]");
  check_stored(latents, latents.narrow(-1, 0, 0), kv_lora_rank);
  const auto bytes = sym_latent_row_bytes(kv_lora_rank, head_dim_ - kv_lora_rank, dtype());
  return DynamicCache::reserve(row_shape(latents, bytes), row_shape(latents, 0));
}

void QuantizedCache::commit(const SymInt& new_len, const std::optional<at::Tensor>& new_lens) {
  DynamicCache::commit(new_len, new_lens);
  if (keeps_exact()) exact_.commit(new_len, new_lens);
}

SymInt QuantizedCache::sym_nbytes() const { return DynamicCache::sym_nbytes() + exact_.sym_nbytes(); }

SymInt QuantizedCache::sym_nbytes_allocated() const {
  return DynamicCache::sym_nbytes_allocated() + exact_.sym_nbytes_allocated();
}

void QuantizedCache::reset() {
  DynamicCache::reset();
  exact_.reset();
  share_lengths();
}

void QuantizedCache::crop(const SymInt& n) {
  check_crop(n);
  if (n == 0) return reset();
  if (!keeps_exact() || sym_len() <= n) return DynamicCache::crop(n);
  // The exact rows are made again of all rows that are held, because the window before position n may have been
  // dropped.
  auto lengths = tensors_.lengths.clamp_max(n);
  const at::Tensor key = k().narrow_symint(2, 0, n), value = v().narrow_symint(2, 0, n);
  DynamicCache::crop(n);
  tensors_.lengths = exact_.tensors_.lengths = lengths;
  exact_.tensors_.key = key;
  exact_.tensors_.value = value;
  exact_.tensors_.dropped = at::zeros_like(lengths);
  exact_.used_ = n;
  exact_.commit(0, std::nullopt);  // drops what is not needed
}

void QuantizedCache::reorder(const at::Tensor& index) {
  DynamicCache::reorder(index);
  if (!keeps_exact()) return;
  exact_.reorder(index);
  share_lengths();
}

std::shared_ptr<KVCache> QuantizedCache::clone() const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto copied = state();
  for (auto& tensor : copied.tensors)
    if (tensor) tensor = tensor->clone();
  auto copy = std::make_shared<QuantizedCache>(options_);
  copy->restore(copied);
  return copy;
}

void QuantizedCache::visit_tensors(TensorVisitor visit) {
  DynamicCache::visit_tensors(visit);
  visit("exact_key", exact_.tensors_.key);
  visit("exact_value", exact_.tensors_.value);
  visit_optional(visit, "exact_dropped", exact_.tensors_.dropped);
}

void QuantizedCache::visit_numbers(NumberVisitor visit) {
  QuantizedCacheOptions::for_each_option(options_,
                                         [&](const char* name, int64_t& option) { visit_int(visit, name, option); });
  DynamicCache::visit_numbers(visit);
  visit("head_dim", head_dim_);
  visit("v_head_dim", v_head_dim_);
  visit_int(visit, "kv_lora_rank", kv_lora_rank_);
  visit_int(visit, "dtype", dtype_);
  visit("exact_used", exact_.used_);
}

void QuantizedCache::check_state() const {
  DynamicCache::check_state();
  check_options(options_);
  ATTNPACK_CHECK(dtype_ >= 0 && dtype_ < static_cast<int64_t>(at::ScalarType::NumOptions), "dtype: got the number ",
                 dtype_, ", want one of torch's dtypes");
  ATTNPACK_CHECK(kv_lora_rank_ >= 0 && kv_lora_rank_ <= head_dim_, "kv_lora_rank: got ", kv_lora_rank_,
                 ", want 0 for keys and values, or at most head_dim = ", head_dim_);
  const auto& exact = exact_.tensors_;
  const bool wanted = keeps_exact() && tensors_.key.defined();
  ATTNPACK_CHECK(
      exact.key.defined() == wanted && exact.value.defined() == wanted && exact.dropped.has_value() == wanted,
      "tensors: got some of exact_key, exact_value and exact_dropped, want ", wanted ? "all" : "none",
      " for exact_first = ", exact_first(), " and exact_last = ", exact_last());
}

void QuantizedCache::after_restore() {
  exact_.tensors_.window = exact_window(options_);
  exact_.tensors_.keep_first = exact_first();
  share_lengths();
}

at::Tensor QuantizedCache::k() const { return expanded(tensors_.key, head_dim_, exact_.tensors().key); }

at::Tensor QuantizedCache::v() const {
  if (kv_lora_rank_ > 0 && tensors_.key.defined()) return k().narrow(3, 0, kv_lora_rank_);
  return expanded(tensors_.value, v_head_dim_, exact_.tensors().value);
}

at::Tensor QuantizedCache::expanded(const at::Tensor& rows, const SymInt& dim, const at::Tensor& exact) const {
  if (!rows.defined()) return rows;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (kv_lora_rank_ > 0) return latents_of_rows(rows.narrow_symint(2, 0, sym_len()), kv_lora_rank_, dtype());
  auto all = dequantize_rows(rows.narrow_symint(2, 0, sym_len()), bits(), dim, dtype());
  if (!exact.defined()) return all;
  // Slots without a position go to a row after the last one.
  const auto position = positions_of_slots(exact_.tensors());
  const auto place =
      position.where(position < tensors_.lengths.unsqueeze(1), at::full_symint({}, sym_len(), position.options()));
  const auto index = place.unsqueeze(1).unsqueeze(-1).expand_symint(exact.sym_sizes());
  return at::constant_pad_nd(all, {0, 0, 0, 1}).scatter(2, index, exact).narrow_symint(2, 0, sym_len());
}

}  // namespace attnpack
