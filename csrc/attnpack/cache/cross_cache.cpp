#include <attnpack/cache/cross_cache.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <attnpack/core/padded.h>

namespace attnpack {

void CrossCache::store(const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& kv_lens) {
  check_defined("key", key);
  check_defined("value", value);
  if (kv_lens) check_defined("kv_lens", *kv_lens);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const auto options = key.options().dtype(at::kLong);
  const auto copy = [](const at::Tensor& x) { return x.detach().clone(at::MemoryFormat::Contiguous); };
  tensors_.key = copy(key);
  tensors_.value = copy(value);
  tensors_.lengths = kv_lens ? kv_lens->to(options, /*non_blocking=*/false, /*copy=*/true)
                             : at::zeros_symint({key.sym_size(0)}, options).add_(key.sym_size(2));
}

void CrossCache::check_call(const at::Tensor& x, const std::optional<at::Tensor>& context) const {
  if (!filled()) {
    ATTNPACK_CHECK(context, "context: got none with an empty CrossCache; give the first call what it is to store");
    return;
  }
  check_defined("x", x);
  if (context) check_defined("context", *context);
  const auto batch = tensors_.key.sym_size(0), length = tensors_.key.sym_size(2);
  ATTNPACK_CHECK(x.dim() != 3 || x.sym_size(0) == batch, "x: got batch ", x.sym_size(0), ", want ", batch,
                 " as the CrossCache holds; reorder() it, or reset() it for another context");
  ATTNPACK_CHECK(!context || (context->dim() == 3 && context->sym_size(0) == batch && context->sym_size(1) == length),
                 "context: got shape ", context->sym_sizes(), ", but the CrossCache holds one of [", batch, ", ",
                 length, ", ...] and reads no other; reset() it for another context, or leave the context out");
}

CacheTensors CrossCache::reserve(const at::Tensor& key, const at::Tensor&) {
  check_defined("key", key);
  ATTNPACK_CHECK(false, "cache: got a CrossCache, want one that appends for keys of shape ", key.sym_sizes(),
                 "; use a DynamicCache or StaticCache, a CrossCache holds the context of cross-attention");
}

CacheTensors CrossCache::reserve_latents(const at::Tensor& latents, int64_t) {
  check_defined("latents", latents);
  ATTNPACK_CHECK(false, "cache: got a CrossCache, want a LatentCache for latents of shape ", latents.sym_sizes(),
                 "; latent attention stores no context");
}

void CrossCache::commit(const c10::SymInt&, const std::optional<at::Tensor>&) {
  ATTNPACK_CHECK(false, "cache: got a CrossCache, to which nothing is appended; use a DynamicCache or StaticCache");
}

void CrossCache::crop(const c10::SymInt& n) {
  ATTNPACK_CHECK(false, "n: got ", n,
                 ", but a CrossCache holds a whole context; reset() it, or give kv_lens to a call");
}

CacheTensors CrossCache::shared() const {
  ATTNPACK_CHECK(false,
                 "kv_from: got a CrossCache, want the cache of another layer's self-attention; give a context's ",
                 "keys as cache");
}

c10::SymInt CrossCache::sym_len() const { return filled() ? tensors_.key.sym_size(2) : c10::SymInt(0); }

void CrossCache::reset() { tensors_ = {at::Tensor(), at::Tensor(), cache_zeros({0}, at::kLong)}; }

void CrossCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  if (!filled()) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (auto* tensor : {&tensors_.key, &tensors_.value, &tensors_.lengths}) *tensor = tensor->index_select(0, rows);
}

}  // namespace attnpack
