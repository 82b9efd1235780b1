#include <attnpack/backend/detail/native_mha.h>

#include <ATen/ATen.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/native/nested/NestedTensorUtils.h>
#include <ATen/ops/_native_multi_head_attention_native.h>
#include <c10/util/Exception.h>

#include <attnpack/backend/detail/reasons.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/attention_varlen.h>
#include <attnpack/ops/detail/attention_arguments.h>

namespace attnpack {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The kinds of masks, as torch numbers them.
enum MaskType : int64_t { kOfScores = 0, kOfKeys = 1, kMerged = 2 };

// Hides the warning that a kernel is replaced, which is what the user asked for.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

bool fits(const Tensor& mask, int64_t type, int64_t batch, int64_t heads, int64_t length) {
  switch (type) {
    case kOfScores:
      return mask.sizes() == at::IntArrayRef({length, length});
    case kOfKeys:
      return mask.sizes() == at::IntArrayRef({batch, length});
    case kMerged:
      return mask.sizes() == at::IntArrayRef({batch, heads, length, length});
    default:
      return false;
  }
}

Reason why_not(const Tensor& query, const Tensor& key, const Tensor& value, int64_t embed_dim, int64_t heads,
               const Tensor& weight, const OptionalTensor& mask, bool need_weights, std::optional<int64_t> mask_type) {
  if (need_weights) return Reason::kWeights;
  if (!query.is_same(key) || !key.is_same(value)) return Reason::kSizes;
  if (at::areAnyTensorSubclassLike({query, weight}) || (mask && at::isTensorSubclassLike(*mask)))
    return Reason::kSubclass;
  const auto dtype = query.scalar_type();
  if (!is_element(dtype) || weight.scalar_type() != dtype) return Reason::kDtype;
  if (heads < 1 || embed_dim % heads != 0 || weight.dim() != 2 || weight.size(0) != 3 * embed_dim)
    return Reason::kSizes;
  if (query.is_nested()) {
    if (mask) return Reason::kMask;
    return query.dim() == 3 && query.is_contiguous() ? Reason::kNone : Reason::kLayout;
  }
  if (query.dim() != 3 || query.size(2) != weight.size(1)) return Reason::kSizes;
  if (!mask) return Reason::kNone;
  const bool known = mask->scalar_type() == at::kBool || mask->is_floating_point();
  return known && fits(*mask, mask_type.value_or(-1), query.size(0), heads, query.size(1)) ? Reason::kNone
                                                                                           : Reason::kMask;
}

// A mask of torch's modules: true, or -inf, excludes.
Tensor allowed(const Tensor& mask, int64_t type) {
  const Tensor t = mask.scalar_type() == at::kBool ? mask.logical_not() : mask;
  return type == kOfKeys ? t.unsqueeze(1).unsqueeze(1) : t;
}

// The projected query, key or value `i` of rows [..., 3 E]: [..., H, D].
Tensor part(const Tensor& qkv, int64_t heads, int64_t i) { return qkv.unflatten(-1, {3, heads, -1}).select(-3, i); }

// [B, T, E] -> [B, T, E]
Tensor attend_dense(const Tensor& qkv, int64_t heads, const OptionalTensor& mask, std::optional<int64_t> mask_type) {
  const auto rows = [&](int64_t i) { return part(qkv, heads, i).transpose(1, 2); };
  AttentionOptions options;
  if (mask) options.mask(allowed(*mask, *mask_type));
  return attention(rows(0), rows(1), rows(2), options).transpose(1, 2).flatten(2);
}

// [T, 3 E] -> [T, E] for the rows of a nested tensor, whose sizes are [B, 2].
Tensor attend_nested(const Tensor& qkv, int64_t heads, const Tensor& sizes) {
  const Tensor lengths = sizes.select(1, 0);
  const Tensor ends = at::cat({at::zeros({1}, lengths.options()), lengths.cumsum(0)});
  return attention_varlen(part(qkv, heads, 0), part(qkv, heads, 1), part(qkv, heads, 2), ends).flatten(1);
}

std::tuple<Tensor, Tensor> native_mha(const Tensor& query, const Tensor& key, const Tensor& value, int64_t embed_dim,
                                      int64_t num_head, const Tensor& qkv_weight, const Tensor& qkv_bias,
                                      const Tensor& proj_weight, const Tensor& proj_bias, const OptionalTensor& mask,
                                      bool need_weights, bool average_attn_weights, std::optional<int64_t> mask_type) {
  const Reason reason = why_not(query, key, value, embed_dim, num_head, qkv_weight, mask, need_weights, mask_type);
  count_call(reason);
  if (reason != Reason::kNone)
    return at::native::native_multi_head_attention_cpu(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias,
                                                       proj_weight, proj_bias, mask, need_weights, average_attn_weights,
                                                       mask_type);
  if (!query.is_nested()) {
    const Tensor out = attend_dense(at::linear(query, qkv_weight, qkv_bias), num_head, mask, mask_type);
    return {at::linear(out, proj_weight, proj_bias), Tensor()};
  }
  const Tensor sizes = query._nested_tensor_size();
  const Tensor rows = at::native::get_buffer(query).view({-1, qkv_weight.size(1)});
  const Tensor out =
      at::linear(attend_nested(at::linear(rows, qkv_weight, qkv_bias), num_head, sizes), proj_weight, proj_bias);
  return {at::native::wrap_buffer(out.view(-1), sizes), Tensor()};
}

}  // namespace

void register_native_mha(Registrations& registrations) {
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard quiet(&none);
  register_kernel(registrations, "_native_multi_head_attention",
                  {c10::DispatchKey::CPU, c10::DispatchKey::NestedTensorCPU}, TORCH_FN(native_mha));
}

}  // namespace attnpack
