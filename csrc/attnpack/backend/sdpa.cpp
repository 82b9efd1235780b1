#include <attnpack/backend/sdpa.h>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include <attnpack/backend/detail/hooks.h>
#include <attnpack/backend/detail/native_mha.h>
#include <attnpack/backend/detail/reasons.h>
#include <attnpack/backend/detail/replaceable.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/torch_kernels.h>
#include <attnpack/ops/detail/unknown_sizes.h>

namespace attnpack {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;

void register_sdpa(Registrations& registrations);

ReplaceableFunction& replaceable_sdpa() {
  static auto& function = *new ReplaceableFunction(
      register_sdpa,
      {"", "a tensor is nested, sparse or quantized", "a tensor is of a class of its own, or a graph is exported",
       "a torch.func transform or forward-mode differentiation is active",
       "the dtypes differ, or are none of float64, float32, bfloat16 and float16",
       "no kernel of attnpack runs on the device, or the devices differ", "the sizes do not fit each other",
       "the numbers of heads do not fit each other", "the mask does not fit, or there is causality too",
       "dropout_p is outside of [0, 1)", "the scale is not finite",
       "torch.nn.attention.sdpa_kernel chose other backends", "nn.MultiheadAttention is to return its weights",
       "torch's own kernel is faster on the device"});
  return function;
}

// A size of the result where two sizes meet by broadcasting, or -1.
SymInt broadcast_size(const SymInt& a, const SymInt& b) {
  if (same_size(a, b) || is_one(b)) return a;
  return is_one(a) ? b : SymInt(-1);
}

// Whether attention can be computed on the inputs' device.
bool runs_on(const c10::Device& device) { return device.is_cpu() || cuda_kernels(device.index()); }

// The call's sizes after broadcasting. batch holds all dims before the heads. Tensors of two or three dims have no
// heads, unless grouped heads were asked for.
struct Sizes {
  c10::SmallVector<SymInt, 4> batch;
  bool with_heads = false;
  SymInt heads = 1, kv_heads = 1;

  int64_t batch_dims() const { return static_cast<int64_t>(batch.size()); }
};

Reason read_batch(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa, Sizes& sizes) {
  sizes.with_heads = query.dim() > 3 || enable_gqa;
  for (int64_t i = 0; i < query.dim() - 2 - sizes.with_heads; ++i) {
    const SymInt keys = broadcast_size(key.sym_size(i), value.sym_size(i));
    const SymInt size = same_size(keys, -1) ? SymInt(-1) : broadcast_size(query.sym_size(i), keys);
    if (same_size(size, -1)) return Reason::kSizes;
    sizes.batch.push_back(size);
  }
  if (!sizes.with_heads) return Reason::kNone;
  const SymInt q = query.sym_size(-3), k = key.sym_size(-3), v = value.sym_size(-3);
  sizes.kv_heads = broadcast_size(k, v);
  if (same_size(sizes.kv_heads, -1)) return Reason::kHeads;
  if (enable_gqa) {
    sizes.heads = q;
    return same_size(k, v) && !is_below_one(k) && same_size(q % k, 0) ? Reason::kNone : Reason::kHeads;
  }
  sizes.heads = broadcast_size(q, sizes.kv_heads);
  return same_size(sizes.heads, -1) ? Reason::kHeads : Reason::kNone;
}

Reason reason_against_mask(const Tensor& mask, const Tensor& query, const Tensor& key, const Sizes& sizes) {
  const auto dtype = mask.scalar_type();
  if (mask.layout() != at::kStrided || mask.device() != query.device()) return Reason::kMask;
  if (dtype != at::kBool && dtype != at::kFloat && dtype != query.scalar_type()) return Reason::kMask;
  const int64_t dims = query.dim();
  if (mask.dim() < 2 || mask.dim() > dims) return Reason::kMask;
  for (int64_t i = 1; i <= mask.dim(); ++i) {
    const SymInt size = mask.sym_size(-i);
    const SymInt wanted = i == 1                       ? key.sym_size(-2)
                          : i == 2                     ? query.sym_size(-2)
                          : i == 3 && sizes.with_heads ? sizes.heads
                                                       : sizes.batch[dims - i];
    if (!is_one(size) && !same_size(size, wanted)) return Reason::kMask;
  }
  return Reason::kNone;
}

// Whether the operator takes the call, and its sizes.
Reason why_not(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
               double dropout_p, bool is_causal, const std::optional<double>& scale, bool enable_gqa, Sizes& sizes) {
  for (const Tensor* t : {&query, &key, &value})
    if (t->layout() != at::kStrided || t->is_nested() || t->is_quantized()) return Reason::kLayout;
  const auto dtype = query.scalar_type();
  if (!is_element(dtype) || key.scalar_type() != dtype || value.scalar_type() != dtype) return Reason::kDtype;
  if (key.device() != query.device() || value.device() != query.device() || !runs_on(query.device()))
    return Reason::kDevice;
  const Tensor given_mask = mask ? *mask : Tensor();
  if (is_transformed({query, key, value, given_mask})) return Reason::kTransform;
  if (!takes_classes_of({query, key, value, given_mask})) return Reason::kSubclass;
  const int64_t dims = query.dim();
  if (dims < (enable_gqa ? 3 : 2) || key.dim() != dims || value.dim() != dims) return Reason::kSizes;
  if (!same_size(key.sym_size(-1), query.sym_size(-1)) || is_below_one(query.sym_size(-1)) ||
      is_below_one(value.sym_size(-1)) || !same_size(value.sym_size(-2), key.sym_size(-2)))
    return Reason::kSizes;
  if (const Reason reason = read_batch(query, key, value, enable_gqa, sizes); reason != Reason::kNone) return reason;
  if (mask) {
    if (is_causal) return Reason::kMask;
    if (const Reason reason = reason_against_mask(*mask, query, key, sizes); reason != Reason::kNone) return reason;
  }
  if (!(dropout_p >= 0 && dropout_p < 1)) return Reason::kDropout;
  if (scale && !std::isfinite(*scale)) return Reason::kScale;
  return Reason::kNone;
}

// The shape of a tensor whose last dims are given.
c10::SmallVector<SymInt, 6> shape_with(const Sizes& sizes, std::initializer_list<SymInt> last) {
  c10::SmallVector<SymInt, 6> shape(sizes.batch.begin(), sizes.batch.end());
  shape.append(last);
  return shape;
}

// [batch, ..., heads, rows, columns] as [batch, heads, rows, columns].
Tensor join_batch(const Tensor& x, int64_t batch_dims) {
  if (batch_dims == 0) return x.unsqueeze(0);
  return batch_dims == 1 ? x : x.flatten(0, batch_dims - 1);
}

// query, key or value as [batch, heads, rows, columns]. Broadcasting repeats no memory.
Tensor with_four_dims(const Tensor& x, const Sizes& sizes, const SymInt& heads) {
  if (x.dim() == 4 && same_size(x.sym_size(0), sizes.batch[0]) && same_size(x.sym_size(1), heads)) return x;
  const Tensor t = sizes.with_heads ? x : x.unsqueeze(-3);
  return join_batch(t.expand_symint(shape_with(sizes, {heads, t.sym_size(-2), t.sym_size(-1)})), sizes.batch_dims());
}

// The mask, right-aligned to [batch, heads, q_len, kv_len].
Tensor with_fitting_dims(const Tensor& mask, const Sizes& sizes) {
  const Tensor t = sizes.with_heads || mask.dim() == 2 ? mask : mask.unsqueeze(-3);
  if (t.dim() <= 3 || sizes.batch_dims() <= 1) return t;
  return join_batch(t.expand_symint(shape_with(sizes, {t.sym_size(-3), t.sym_size(-2), t.sym_size(-1)})),
                    sizes.batch_dims());
}

// torch's fused kernel broadcasts no batch, and from 2.14 on a single kv head.
constexpr bool kFusesOneKvHead = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14;

// Whether torch's fused kernel would run.
bool torch_would_fuse(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                      double dropout_p, bool enable_gqa) {
  const bool same_batch = query.dim() == 4 && same_size(query.sym_size(0), key.sym_size(0)) &&
                          same_size(query.sym_size(0), value.sym_size(0));
  const bool same_heads =
      same_batch &&
      (enable_gqa ||
       (same_size(query.sym_size(1), key.sym_size(1)) && same_size(query.sym_size(1), value.sym_size(1))) ||
       (kFusesOneKvHead && is_one(key.sym_size(1)) && is_one(value.sym_size(1))));
  const auto dense = [](const Tensor& t) { return is_one(t.sym_stride(-1)); };
  return same_heads && dense(query) && dense(key) && dense(value) &&
         same_size(value.sym_size(-1), query.sym_size(-1)) && dropout_p == 0 && !(mask && mask->requires_grad()) &&
         !is_below_one(query.sym_numel()) && !is_below_one(key.sym_size(-2));
}

// Whether two tensors of the same sizes have the same elements at the same places.
bool same_layout(const Tensor& a, const Tensor& b) {
  for (int64_t i = 0; i < a.dim(); ++i)
    if (!is_one(a.sym_size(i)) && !same_size(a.sym_stride(i), b.sym_stride(i))) return false;
  return true;
}

// The result in torch's shape, and with torch's strides: those of the query if its fused kernel would run, and
// contiguous otherwise.
Tensor as_torch_gives(const Tensor& out, const Tensor& query, const Sizes& sizes, bool fused) {
  if (query.dim() != 4) {
    auto shape = shape_with(sizes, {});
    if (sizes.with_heads) shape.push_back(sizes.heads);
    shape.append({out.sym_size(-2), out.sym_size(-1)});
    return out.contiguous().view_symint(shape);
  }
  if (!fused || query.is_contiguous_or_false()) return out.contiguous();
  const Tensor like = at::empty_like(query.detach());
  return same_layout(like, out) ? out : like.copy_(out);
}

// Whether the user's choice of backends (torch.nn.attention.sdpa_kernel) leaves the operator, which counts as flash
// attention, to run.
bool is_chosen(bool fused) {
  const auto& context = at::globalContext();
  return context.userEnabledFlashSDP() && (fused || context.userEnabledMathSDP());
}

// Whether torch's own kernel is faster, by a table (ops/detail/torch_kernels.h).
bool torch_is_faster(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                     double dropout_p, bool is_causal, bool fused) {
  const CudaKernels* kernels = cuda_kernels(query.device().index());
  if (!kernels || !fused || cuda_choice() == CudaChoice::kOwn) return false;
  AttentionArguments args;
  args.mask = mask;
  args.causal = is_causal;
  args.dropout_p = dropout_p;
  TorchCall call{};
  if (!is_plain_call(*kernels, query, key, value, args, &call)) return false;
  call.gradients = torch::autograd::compute_requires_grad(query, key, value);
  return sdpa_is_faster(call);
}

// x with dims of size 1 before its own.
Tensor with_dims(Tensor x, int64_t dims) {
  while (x.dim() < dims) x = x.unsqueeze(0);
  return x;
}

Tensor sdpa(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double dropout_p,
            bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const int64_t dims = std::max({query.dim(), key.dim(), value.dim()});
  if (std::min({query.dim(), key.dim(), value.dim()}) >= 2 &&
      (query.dim() < dims || key.dim() < dims || value.dim() < dims) && !query.is_nested() && !key.is_nested() &&
      !value.is_nested())
    return sdpa(with_dims(query, dims), with_dims(key, dims), with_dims(value, dims), mask, dropout_p, is_causal, scale,
                enable_gqa);
  Sizes sizes;
  Reason reason = why_not(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, sizes);
  const bool fused = reason == Reason::kNone && torch_would_fuse(query, key, value, mask, dropout_p, enable_gqa);
  if (reason == Reason::kNone && !is_chosen(fused)) reason = Reason::kChoice;
  if (reason == Reason::kNone && torch_is_faster(query, key, value, mask, dropout_p, is_causal, fused))
    reason = Reason::kFaster;
  count_call(reason);
  if (reason != Reason::kNone)
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  AttentionOptions options;
  options.causal(is_causal).dropout_p(dropout_p).scale(scale);
  if (mask) options.mask(with_fitting_dims(*mask, sizes));
  const Tensor out = attention(with_four_dims(query, sizes, sizes.heads), with_four_dims(key, sizes, sizes.kv_heads),
                               with_four_dims(value, sizes, sizes.kv_heads), options);
  return as_torch_gives(out, query, sizes, fused);
}

void register_sdpa(Registrations& registrations) {
  using c10::DispatchKey;
  register_kernel(registrations, "scaled_dot_product_attention",
                  {DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::CUDA, DispatchKey::AutogradCUDA},
                  TORCH_FN(sdpa));
  register_native_mha(registrations);
}

}  // namespace

void count_call(Reason reason) { replaceable_sdpa().count_call(static_cast<size_t>(reason)); }

Replacement enable_sdpa() { return replaceable_sdpa().enable(); }
bool sdpa_enabled() { return replaceable_sdpa().enabled(); }
ReplacementReport sdpa_report() { return replaceable_sdpa().report(); }
void reset_sdpa_report() { replaceable_sdpa().reset_report(); }
void set_sdpa_hook(ChangeHook changed) { replaceable_sdpa().on_change(std::move(changed)); }

}  // namespace attnpack
