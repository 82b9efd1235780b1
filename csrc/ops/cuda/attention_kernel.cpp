#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

#include <attnpack/ops/cpu/attention_params.h>
#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/on_device.h>
#include <attnpack/ops/cuda/prepare.h>

namespace attnpack {
namespace {

struct CudaAttention {
  PreparedAttention prepared;
  int64_t most_group;
};

CudaAttention prepare(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS) {
  CudaAttention r{prepare_attention(query, key, value, ATTNPACK_ATTENTION_ARGS), 0};
  AttentionParams& p = r.prepared.params;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) r.most_group = std::max(r.most_group, group_size(p, h));
  if (head_map) {
    const auto kept = [&](const std::vector<int64_t>& numbers) {
      return on_device<int64_t>(numbers, query.device()).const_data_ptr<int64_t>();
    };
    p.group_start = kept(r.prepared.groups.start);
    p.group_heads = kept(r.prepared.groups.heads);
  }
  return r;
}

// To look at kv_lens waits for the device: calls clamp them, and look with ATTNPACK_CHECK=1 alone.
void check_lengths_if_asked(const std::optional<Tensor>& kv_lens, int64_t kv_len) {
  const char* asked = std::getenv("ATTNPACK_CHECK");
  if (!kv_lens || !asked || std::strcmp(asked, "1") != 0) return;
  const Tensor lens = kv_lens->to(at::kCPU, at::kLong).contiguous();
  check_kv_lens_values(lens.const_data_ptr<int64_t>(), lens.numel(), kv_len);
}

// Rows, heads and keys are counted in 32 bits by the kernels; elements are not.
bool countable(const Tensor& query, const Tensor& key) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 64;
  return query.size(1) <= kMost && query.size(2) <= kMost && key.size(2) <= kMost;
}

AttentionResult attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS) {
  check_attention(query, key, value, ATTNPACK_ATTENTION_ARGS);
  check_lengths_if_asked(kv_lens, key.size(2));
  const CudaKernels* kernels = cuda_kernels(query.device().index());
  if (!kernels || !countable(query, key)) return attention_composed(query, key, value, ATTNPACK_ATTENTION_ARGS);
  const Target target(query);
  CudaAttention call = prepare(query, key, value, ATTNPACK_ATTENTION_ARGS);
  AttentionParams& p = call.prepared.params;
  const Tensor out = empty_heads_inside({p.batch, p.num_heads, p.q_len, p.v_head_dim}, query.options());
  const Tensor lse =
      at::empty({p.batch, p.num_heads, p.q_len}, query.options().dtype(accumulation_type(query.scalar_type())));
  p.out = out.mutable_data_ptr();
  p.out_strides = kernel_strides(out);
  p.lse = lse.mutable_data_ptr();
  const cuda::ForwardPlan plan = kernels->plan(p, call.most_group, target.device());
  const Tensor workspace = at::empty({plan.workspace_bytes}, query.options().dtype(at::kByte));
  check_launch(kernels->forward(p, plan, workspace.mutable_data_ptr(), target.device(), target.stream()));
  return {out, lse};
}

AttentionGradients attention_backward_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                           const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& lse, ATTNPACK_ATTENTION_PARAMS,
                                           bool mask_gradient, bool sinks_gradient) {
  const CudaKernels* kernels = cuda_kernels(query.device().index());
  if (!kernels || !countable(query, key))
    return attention_backward_composed(grad_out, grad_lse, query, key, value, ATTNPACK_ATTENTION_ARGS, mask_gradient,
                                       sinks_gradient);
  const Target target(query);
  const CudaAttention call = prepare(query, key, value, ATTNPACK_ATTENTION_ARGS);
  AttentionBackwardParams bp{};
  AttentionParams& p = bp.forward = call.prepared.params;
  const auto accumulation = accumulation_type(query.scalar_type());
  const Tensor lse_rows = lse.contiguous(), gradient = unit_last_stride(grad_out.to(query.scalar_type()));
  // D = rowsum(dO * O) - dlse: what every score of a row has in common.
  Tensor delta = grad_out.to(accumulation).mul(out).sum(-1);
  if (grad_lse) delta = delta.sub(*grad_lse);
  delta = delta.contiguous();
  p.lse = lse_rows.data_ptr();
  bp.grad_out = gradient.const_data_ptr();
  bp.grad_out_strides = kernel_strides(gradient);
  bp.delta = delta.const_data_ptr();
  const auto like = [](const Tensor& t) { return empty_heads_inside(t.sym_sizes(), t.options()); };
  const Tensor grad_query = like(query), grad_key = like(key), grad_value = like(value);
  bp.grad_query = grad_query.mutable_data_ptr();
  bp.grad_key = grad_key.mutable_data_ptr();
  bp.grad_value = grad_value.mutable_data_ptr();
  bp.grad_query_strides = kernel_strides(grad_query);
  bp.grad_key_strides = kernel_strides(grad_key);
  bp.grad_value_strides = kernel_strides(grad_value);
  Tensor grad_scores;
  if (mask_gradient) {
    grad_scores = at::zeros({p.batch, p.num_heads, p.q_len, p.kv_len}, query.options().dtype(accumulation));
    bp.grad_scores = grad_scores.mutable_data_ptr();
  }
  check_launch(kernels->backward(bp, call.most_group, target.device(), target.stream()));
  Tensor grad_mask = at::empty({0}, query.options()), grad_sinks = at::empty({0}, query.options());
  if (mask_gradient) grad_mask = grad_scores.sum_to_size(mask->sizes()).to(mask->scalar_type());
  if (sinks_gradient) {
    // The sink's probability exp(sink - lse) takes part in nothing but the denominator: its score gets -P_sink * D.
    const Tensor probability = (sinks->to(accumulation).view({-1, 1}) - lse)
                                   .exp()
                                   .masked_fill(lse == -std::numeric_limits<double>::infinity(), 0);
    grad_sinks = probability.mul(delta).neg().sum({0, 2}).to(sinks->scalar_type());
  }
  return {grad_query, grad_key, grad_value, grad_mask, grad_sinks};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("attention", attnpack::attention_cuda);
  m.impl("attention_backward", attnpack::attention_backward_cuda);
}
