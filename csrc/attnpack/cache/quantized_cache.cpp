#include <attnpack/cache/quantized_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string_view>

#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/kv_window.h>
#include <attnpack/ops/detail/latent_rows.h>
#include <attnpack/ops/quantize.h>

namespace attnpack {

using c10::SymInt;

namespace {

SlidingWindowCache exact_cache(const QuantizedCacheOptions& o) {
  constexpr int64_t kMost = int64_t{1} << 40;
  ATTNPACK_CHECK(o.bits() == 8 || o.bits() == 4, "bits: got ", o.bits(),
                 ", want 8 or 4; a DynamicCache holds 16 or 32");
  ATTNPACK_CHECK(o.exact_first() >= 0 && o.exact_first() <= kMost, "exact_first: got ", o.exact_first(),
                 ", want how many first positions are exact, 0 or more");
  ATTNPACK_CHECK(o.exact_last() >= 0 && o.exact_last() <= kMost, "exact_last: got ", o.exact_last(),
                 ", want how many last positions are exact, 0 or more");
  const int64_t left = std::max<int64_t>(o.exact_last() - 1, 0);  // a position sees itself beside those before it
  return SlidingWindowCache(SlidingWindowCacheOptions(left).keep_first(o.exact_first()));
}

// A tensor that has the shape of x's rows, of that many bytes each, without memory for them.
at::Tensor row_shape(const at::Tensor& x, const SymInt& bytes) {
  return at::empty_symint({bytes}, x.options().dtype(at::kByte).requires_grad(false))
      .expand_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), bytes});
}

}  // namespace

QuantizedCache::QuantizedCache(const QuantizedCacheOptions& options)
    : options_(options), exact_(exact_cache(options)) {}

void QuantizedCache::share_lengths() {
  auto state = exact_.state();
  state.tensors[0] = tensors_.lengths;
  exact_.restore(state);
}

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
    dtype_ = key.scalar_type();
    return;
  }
  ATTNPACK_CHECK(kv_lora_rank == kv_lora_rank_, "cache: got ", kv_lora_rank ? "latents" : "keys and values",
                 " of kv_lora_rank ", kv_lora_rank, ", want ", kv_lora_rank_,
                 " as the cache holds (0: keys and values); use a cache of this layer's shape, or reset() it");
  const auto shape_of = [&](const at::Tensor& rows, const SymInt& dim) {
    return at::empty_symint({rows.sym_size(0), rows.sym_size(1), 0, dim}, rows.options().dtype(dtype_));
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
  const auto bytes = sym_latent_row_bytes(kv_lora_rank, head_dim_ - kv_lora_rank, dtype_);
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
  const auto first = [&](const at::Tensor& all) { return all.narrow_symint(2, 0, n); };
  const CacheState exact{{lengths, first(k()), first(v()), at::zeros_like(lengths)}, exact_.numbers()};
  DynamicCache::crop(n);
  tensors_.lengths = lengths;
  exact_.restore(exact);
  visit_exact_used([&](SymInt& used) { used = n; });
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
  for (auto& tensor : copied.tensors) tensor = tensor.clone();
  auto copy = std::make_shared<QuantizedCache>(options_);
  copy->restore(copied);
  return copy;
}

CacheState QuantizedCache::state() const {
  auto result = DynamicCache::state();
  const auto exact = exact_.state();
  if (exact.tensors.size() > 1) {
    for (const auto n : {3, 1, 2}) result.tensors.push_back(exact.tensors[n]);  // dropped, key, value
  }
  return result;
}

void QuantizedCache::visit_numbers(NumberVisitor visit) {
  for (auto [name, setting] :
       {std::pair{"bits", bits()}, std::pair{"exact_first", exact_first()}, std::pair{"exact_last", exact_last()}})
    visit_int(visit, name, setting);  // the constructor has read it
  DynamicCache::visit_numbers(visit);
  visit("head_dim", head_dim_);
  visit("v_head_dim", v_head_dim_);
  visit_int(visit, "kv_lora_rank", kv_lora_rank_);
  int64_t dtype = static_cast<int64_t>(dtype_);
  visit_int(visit, "dtype", dtype);
  ATTNPACK_CHECK(dtype >= 0 && dtype < static_cast<int64_t>(at::ScalarType::NumOptions), "dtype: got the number ",
                 dtype, ", want one of torch's dtypes");
  dtype_ = static_cast<at::ScalarType>(dtype);
  visit_exact_used([&](SymInt& used) { visit("exact_used", used); });
}

void QuantizedCache::visit_exact_used(c10::function_ref<void(SymInt& used)> visit) {
  exact_.visit_numbers([&](const char* name, SymInt& number) {
    if (std::string_view(name) == "used") visit(number);
  });
}

void QuantizedCache::restore(const CacheState& state) {
  const auto& parts = state.tensors;
  ATTNPACK_CHECK(parts.size() == 1 || parts.size() == (keeps_exact() ? 6 : 3), "tensors: got ", parts.size(),
                 ", want only lengths, or lengths, keys and values",
                 keeps_exact() ? ", and dropped, keys and values" : "", " for a QuantizedCache");
  DynamicCache::restore({{parts.begin(), parts.begin() + std::min<size_t>(parts.size(), 3)}, state.numbers});
  ATTNPACK_CHECK(kv_lora_rank_ >= 0 && kv_lora_rank_ <= head_dim_, "kv_lora_rank: got ", kv_lora_rank_,
                 ", want 0 for keys and values, or at most head_dim = ", head_dim_);
  CacheState exact{{parts[0]}, exact_.numbers()};
  if (parts.size() == 6) exact.tensors.insert(exact.tensors.end(), {parts[4], parts[5], parts[3]});
  exact_.restore(exact);
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
  if (kv_lora_rank_ > 0) return latents_of_rows(rows.narrow_symint(2, 0, sym_len()), kv_lora_rank_, dtype_);
  auto all = dequantize_rows(rows.narrow_symint(2, 0, sym_len()), bits(), dim, dtype_);
  if (!exact.defined()) return all;
  // Slots without a position go to a row after the last one.
  const auto position = positions_of_slots(exact_.tensors());
  const auto place =
      position.where(position < tensors_.lengths.unsqueeze(1), at::full_symint({}, sym_len(), position.options()));
  const auto index = place.unsqueeze(1).unsqueeze(-1).expand_symint(exact.sym_sizes());
  return at::constant_pad_nd(all, {0, 0, 0, 1}).scatter(2, index, exact).narrow_symint(2, 0, sym_len());
}

}  // namespace attnpack
