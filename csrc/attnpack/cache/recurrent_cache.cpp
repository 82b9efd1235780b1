#include <attnpack/cache/recurrent_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <attnpack/core/padded.h>

namespace attnpack {

using c10::SymInt;

namespace {

void check_stored(const char* name, const at::Tensor& stored, const SymInt& batch, at::IntArrayRef shape) {
  bool fits = stored.defined() != shape.empty();
  if (stored.defined() && fits) {
    fits = stored.dim() == static_cast<int64_t>(shape.size()) + 1;
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = stored.sym_size(static_cast<int64_t>(i) + 1) == shape[i];
  }
  ATTNPACK_CHECK(fits, "cache: got a RecurrentCache whose ", name, " has shape ",
                 stored.defined() ? stored.sym_sizes() : c10::SymIntArrayRef(), ", want [B, ", shape,
                 "] as this layer has; use a cache for each layer, or reset() it");
  ATTNPACK_CHECK(!stored.defined() || stored.sym_size(0) == batch, "cache: got one of batch ",
                 stored.defined() ? stored.sym_size(0) : SymInt(0), ", want ", batch,
                 " as in x; reorder() it, or reset() it");
}

[[noreturn]] void refuse(const char* wanted) {
  ATTNPACK_CHECK(false, "cache: got a RecurrentCache, which holds the state of a recurrent layer, want ", wanted);
  std::abort();
}

}  // namespace

RecurrentStates RecurrentCache::states(const SymInt& batch, at::IntArrayRef conv_shape,
                                       at::IntArrayRef state_shape) const {
  if (states_.is_empty()) return {};
  check_stored("convolution state", states_.conv, batch, conv_shape);
  check_stored("state", states_.state, batch, state_shape);
  return {readable(states_.conv), readable(states_.state)};
}

void RecurrentCache::advance(const RecurrentStates& states, const SymInt& new_len,
                             const std::optional<at::Tensor>& new_lens) {
  const at::Tensor& some = states.state.defined() ? states.state : states.conv;
  check_defined("state", some);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const auto before =
      states_.is_empty() ? cache_zeros({some.sym_size(0)}, some.options().dtype(at::kLong)) : tensors_.lengths;
  if (new_lens) check_new_lens(*new_lens, before.sym_size(0));
  tensors_.lengths = new_lens ? before + new_lens->to(before.options()) : before.add(new_len);
  len_ = new_lens ? longest_length(tensors_.lengths, len_ + new_len) : len_ + new_len;
  states_ = {states.conv.defined() ? states.conv.detach() : states.conv,
             states.state.defined() ? states.state.detach() : states.state};
}

void RecurrentCache::take_back(const CacheBefore& before) { in_place_ ? reset() : KVCache::take_back(before); }

at::Tensor RecurrentCache::readable(const at::Tensor& stored) {
  if (!stored.defined() || !stored.is_inference() || c10::InferenceMode::is_enabled()) return stored;
  return stored.clone();
}

CacheTensors RecurrentCache::reserve(const at::Tensor&, const at::Tensor&) {
  refuse("one for keys and values: a DynamicCache or StaticCache");
}
CacheTensors RecurrentCache::reserve_latents(const at::Tensor&, int64_t) { refuse("a LatentCache for latents"); }
void RecurrentCache::commit(const SymInt&, const std::optional<at::Tensor>&) {
  refuse("one to which keys are appended: a DynamicCache or StaticCache");
}
CacheTensors RecurrentCache::shared() const {
  ATTNPACK_CHECK(false, "kv_from: got a RecurrentCache, which holds no keys, want the cache of another layer of ",
                 "attention");
}

SymInt RecurrentCache::sym_nbytes() const {
  SymInt bytes = 0;
  for (const auto* stored : {&states_.conv, &states_.state})
    if (stored->defined()) bytes += stored->sym_nbytes();
  return bytes;
}

void RecurrentCache::reset() {
  tensors_ = {at::Tensor(), at::Tensor(), cache_zeros({0}, at::kLong)};
  states_ = {};
  len_ = 0;
}

void RecurrentCache::crop(const SymInt& n) {
  check_crop(n);
  ATTNPACK_CHECK(n >= len_, "n: got ", n, " for a RecurrentCache that has read ", len_,
                 " positions: a state cannot forget its last tokens; keep a clone() from before them, or reset() it");
}

void RecurrentCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  if (states_.is_empty()) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (auto* stored : {&states_.conv, &states_.state, &tensors_.lengths})
    if (stored->defined()) *stored = stored->index_select(0, rows);
  // A convolution state is stored as its rows are read, whatever index_select gives.
  if (states_.conv.defined()) states_.conv = states_.conv.transpose(1, 2).contiguous().transpose(1, 2);
  len_ = longest_length(tensors_.lengths, len_);
}

std::shared_ptr<KVCache> RecurrentCache::clone() const {
  auto copy = std::make_shared<RecurrentCache>(*this);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (auto* stored : {&copy->states_.conv, &copy->states_.state, &copy->tensors_.lengths})
    if (stored->defined()) *stored = stored->clone();
  return copy;
}

}  // namespace attnpack
