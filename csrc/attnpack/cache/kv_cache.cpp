#include <attnpack/cache/kv_cache.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/InferenceMode.h>

#include <attnpack/core/padded.h>
#include <attnpack/core/sizes.h>
#include <attnpack/core/text.h>

namespace attnpack {

namespace {

void check_part(const char* name, const at::Tensor& stored, const at::Tensor& added) {
  const bool same = added.dim() == 4 && added.sym_size(0) == stored.sym_size(0) &&
                    added.sym_size(1) == stored.sym_size(1) && added.sym_size(3) == stored.sym_size(3);
  ATTNPACK_CHECK(same, "cache: got ", name, " of shape ", added.sym_sizes(), ", want [", stored.sym_size(0), ", ",
                 stored.sym_size(1), ", L, ", stored.sym_size(3),
                 "] as the cache holds; use a cache of this layer's shape, or reset() it");
  ATTNPACK_CHECK(added.scalar_type() == stored.scalar_type() && added.device() == stored.device(), "cache: got ", name,
                 " in ", added.scalar_type(), " on ", added.device(), ", want ", stored.scalar_type(), " on ",
                 stored.device(), " as the cache holds; use a cache of the module's dtype and device");
}

}  // namespace

CacheTensors KVCache::reserve_valid(const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>&) {
  return reserve(key, value);
}

CacheTensors KVCache::reserve_latents(const at::Tensor& latents, int64_t) {
  check_defined("latents", latents);
  return reserve(latents, latents.narrow(-1, 0, 0));
}

c10::SymInt KVCache::sym_nbytes_allocated() const {
  return tensors_.key.defined() ? tensors_.key.sym_nbytes() + tensors_.value.sym_nbytes() : c10::SymInt(0);
}

void visit_optional(TensorVisitor visit, const char* name, std::optional<at::Tensor>& tensor) {
  const at::Tensor before = tensor.value_or(at::Tensor());
  at::Tensor part = before;
  visit(name, part);
  if (!part.is_same(before)) tensor = part.defined() ? std::make_optional(part) : std::nullopt;
}

void visit_int(NumberVisitor visit, const char* name, int64_t& number) {
  c10::SymInt symbol = number;
  visit(name, symbol);
  number = symbol.guard_int(__FILE__, __LINE__);
}

void KVCache::visit_tensors(TensorVisitor visit) {
  visit("lengths", tensors_.lengths);
  visit("key", tensors_.key);
  visit("value", tensors_.value);
}

std::vector<std::string> KVCache::tensor_names() const {
  std::vector<std::string> names;
  const_cast<KVCache*>(this)->visit_tensors([&](const char* name, at::Tensor&) { names.emplace_back(name); });
  return names;
}

std::vector<std::string> KVCache::number_names() const {
  std::vector<std::string> names;
  const_cast<KVCache*>(this)->visit_numbers([&](const char* name, c10::SymInt&) { names.emplace_back(name); });
  return names;
}

CacheState KVCache::state() const {
  CacheState state;
  state.tensors.reserve(6);  // the most that a cache has: states are made at each step
  state.numbers.reserve(9);
  auto& self = const_cast<KVCache&>(*this);
  self.visit_tensors([&](const char*, at::Tensor& tensor) {
    state.tensors.push_back(tensor.defined() ? std::make_optional(tensor) : std::nullopt);
  });
  self.visit_numbers([&](const char*, c10::SymInt& number) { state.numbers.push_back(number); });
  return state;
}

void KVCache::swap_state(CacheState& state) {
  auto tensor = state.tensors.begin();
  visit_tensors([&](const char*, at::Tensor& own) {
    at::Tensor given = tensor->value_or(at::Tensor());
    *tensor++ = own.defined() ? std::make_optional(own) : std::nullopt;
    own = std::move(given);
  });
  auto number = state.numbers.begin();
  visit_numbers([&](const char*, c10::SymInt& own) { std::swap(own, *number++); });
}

void KVCache::restore(CacheState state) {
  size_t tensors = 0, numbers = 0;
  visit_tensors([&](const char*, at::Tensor&) { ++tensors; });
  visit_numbers([&](const char*, c10::SymInt&) { ++numbers; });
  const auto check = [](const char* what, size_t got, size_t want, const auto& names) {
    ATTNPACK_CHECK(got == want, what, ": got ", got, ", want ", want, " for a cache of this class",
                   want > 0 ? ": " : "", joined_by(", ", names()));
  };
  check("tensors", state.tensors.size(), tensors, [&] { return tensor_names(); });
  check("numbers", state.numbers.size(), numbers, [&] { return number_names(); });
  swap_state(state);
  try {
    check_state();
  } catch (...) {
    swap_state(state);
    throw;
  }
  after_restore();
}

void KVCache::check_state() const {
  ATTNPACK_CHECK(tensors_.lengths.defined(), "tensors: got no lengths, want those of each sequence");
  ATTNPACK_CHECK(tensors_.key.defined() == tensors_.value.defined(),
                 "tensors: got only one of key and value, want both or none");
}

void KVCache::take_back(const CacheBefore& before) {
  restore(before.state);
  tensors_.lengths.copy_(before.lengths);
}

void check_crop(const c10::SymInt& n) {
  ATTNPACK_CHECK(n >= 0, "n: got ", n, ", want how many positions to keep, 0 or more");
}

void check_given(const at::Tensor& key, const at::Tensor& value) {
  check_defined("key", key);
  check_defined("value", value);
  const auto check = [](const char* name, const at::Tensor& x) {
    const bool rows = at::isFloatingType(x.scalar_type()) || x.scalar_type() == at::kByte;  // numbers, or quantised
    ATTNPACK_CHECK(x.dim() == 4 && rows, name, ": got shape ", x.sym_sizes(), " and dtype ", x.scalar_type(),
                   ", want a float tensor [batch, num_kv_heads, L, head_dim]");
  };
  check("key", key);
  check("value", value);
}

void check_fits(const CacheTensors& cache, const at::Tensor& key, const at::Tensor& value) {
  check_given(key, value);
  check_part("keys", cache.key, key);
  check_part("values", cache.value, value);
}

CacheTensors shared_keys(const KVCache& cache, const at::Tensor& x, const std::optional<at::Tensor>& new_lens,
                         int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim) {
  const auto shared = cache.shared();
  ATTNPACK_CHECK(shared.key.defined(),
                 "kv_from: got an empty cache, want one that holds the tokens of x; call the layer ",
                 "that fills it first");
  const auto& key = shared.key;
  ATTNPACK_CHECK(
      key.sym_size(1) == num_kv_heads && key.sym_size(3) == head_dim && shared.value.sym_size(3) == v_head_dim,
      "kv_from: got keys of shape ", key.sym_sizes(), " and values of ", shared.value.sym_sizes(), ", want ",
      num_kv_heads, " kv heads of head_dim ", head_dim, " and values of ", v_head_dim,
      ", as this layer has; make both layers with the same ones");
  const auto batch = x.sym_size(0);
  ATTNPACK_CHECK(key.sym_size(0) == batch, "kv_from: got a cache of batch ", key.sym_size(0), ", want ", batch,
                 " as in x");
  const auto readable = [](const at::Tensor& t) { return t.is_cpu() && !at::isTensorSubclassLike(t); };
  if (new_lens) check_new_lens(*new_lens, batch);
  if (!readable(shared.lengths) || !readable(x) || (new_lens && !readable(*new_lens))) return shared;
  const auto lengths = shared.lengths.contiguous();
  const auto added = new_lens ? new_lens->to(at::kLong).contiguous() : at::Tensor();
  for (int64_t b = 0; b < lengths.numel(); ++b) {
    const auto most = lengths.const_data_ptr<int64_t>()[b];
    const auto count = new_lens ? added.const_data_ptr<int64_t>()[b] : x.size(1);
    check_new_len(b, count, x.size(1));
    ATTNPACK_CHECK(most >= count, "kv_from: holds ", most, " positions of sequence ", b, ", but x has ", count,
                   " new tokens there, whose keys it should hold too; call the layer that fills it first");
  }
  return shared;
}

at::Tensor check_index(const at::Tensor& index, const at::Tensor& lengths, bool same_batch, const char* name) {
  check_defined(name, index);
  const auto batch = lengths.sym_size(0);
  ATTNPACK_CHECK(index.dim() == 1 && index.scalar_type() == at::kLong && (!same_batch || index.sym_size(0) == batch),
                 name, ": got ", index.scalar_type(), " of shape ", index.sym_sizes(), ", want int64 ",
                 same_batch ? text_of({"[", batch, "]: a StaticCache keeps its batch size"})
                            : "sequence numbers [B]: call .long(), in C++ .to(at::kLong)");
  // Elsewhere reading would wait for the device. A tensor that torch.compile traces has no numbers yet.
  if (batch > 0 && index.is_cpu() && !at::isTensorSubclassLike(index)) {
    const auto read = index.contiguous();
    for (int64_t b = 0; b < read.numel(); ++b) {
      const auto row = read.const_data_ptr<int64_t>()[b];
      ATTNPACK_CHECK(row >= 0 && row < batch, name, "[", b, "] is ", row, ", wants 0 to ", batch - 1,
                     ": a sequence that the cache holds");
    }
  }
  return index.to(lengths.device());
}

at::Tensor cache_grown(const at::Tensor& like, const c10::SymInt& len, const c10::SymInt& capacity) {
  auto larger = cache_zeros({like.sym_size(0), like.sym_size(1), capacity, like.sym_size(3)}, like.options());
  if (len == 0) return larger;
  at::NoGradGuard no_grad;
  larger.narrow_symint(2, 0, len).copy_(like.narrow_symint(2, 0, len));
  return larger;
}

at::Tensor first_positions(const at::Tensor& tensor, const c10::SymInt& n) {
  const auto number = n.maybe_as_int();
  if (!number || at::isTensorSubclassLike(tensor)) return tensor.narrow_symint(2, 0, n);
  // narrow is three operators in one another; each layer of each step makes two of these views.
  return tensor.as_strided({tensor.size(0), tensor.size(1), *number, tensor.size(3)}, tensor.strides());
}

c10::SymInt bytes_of_position(const CacheTensors& cache) {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.sym_size(0) * tensor.sym_size(1) * tensor.sym_size(3) * static_cast<int64_t>(tensor.element_size());
  };
  return bytes(cache.key) + bytes(cache.value);
}

at::Tensor cache_zeros(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  if (const auto numbers = c10::asIntArrayRefSlowOpt(sizes))
    check_storable("cache: its batch, kv heads, positions and head_dim", *numbers, options.dtype().itemsize());
  c10::InferenceMode normal(false);
  return at::zeros_symint(sizes, options);
}

std::optional<c10::SymInt> KVCache::known_length(const at::Tensor& lengths, const c10::SymInt& capacity) {
  if (!lengths.is_cpu() || at::isTensorSubclassLike(lengths)) return std::nullopt;
  return longest_length(lengths, capacity);
}

CacheTensors KVCache::copy_tensors(const CacheTensors& tensors) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const auto copy = [](const at::Tensor& t) { return t.defined() ? t.clone() : t; };
  CacheTensors result = tensors;
  std::optional<c10::SymInt> length;  // of the positions to copy, if it is known
  if (tensors.key.defined() && !tensors.dropped) length = known_length(tensors.lengths, tensors.key.sym_size(2));
  for (auto* room : {&result.key, &result.value}) {
    const at::Tensor from = *room;
    *room = length ? at::empty_like(from) : copy(from);
    if (length) room->narrow_symint(2, 0, *length).copy_(from.narrow_symint(2, 0, *length));
  }
  result.lengths = copy(tensors.lengths);
  if (result.dropped) result.dropped = copy(*result.dropped);
  return result;
}

}  // namespace attnpack
