#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/run_attention.h>
#include <attnpack/ops/cuda/selected_keys.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/torch_kernels.h>

namespace attnpack {

CudaAttention prepare_cuda_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const AttentionArguments& args) {
  if (args.chunk) {  // the kernels do not have this rule
    const Tensor column = at::arange(key.size(2), query.options().dtype(at::kLong));
    return prepare_cuda_attention(query, key, value, with_chunks_masked(args, row_positions(query, args), column));
  }
  CudaAttention r{prepare_attention(query, key, value, args), 0};
  AttentionParams& p = r.prepared.params;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) r.most_group = std::max(r.most_group, group_size(p, h));
  if (args.head_map) {
    const auto kept = [&](const std::vector<int64_t>& numbers) {
      return on_device<int64_t>(numbers, query.device()).const_data_ptr<int64_t>();
    };
    p.group_start = kept(r.prepared.groups.start);
    p.group_heads = kept(r.prepared.groups.heads);
  }
  cuda::drop_unused_strides(p);
  return r;
}

AttentionResult run_cuda_forward(const CudaKernels& kernels, CudaAttention& call, const Tensor& query) {
  const Target target(query);
  const AttentionResult result = make_outputs(call.prepared, query);
  const AttentionParams& p = call.prepared.params;
  const cuda::ForwardPlan plan = kernels.plan(p, call.most_group, target.device());
  const Tensor workspace = at::empty({plan.workspace_bytes}, query.options().dtype(at::kByte));
  check_launch(kernels.forward(p, plan, workspace.mutable_data_ptr(), target.device(), target.stream()));
  return result;
}

void run_cuda_backward(const CudaKernels& kernels, const CudaAttention& call, PreparedBackward& r,
                       const Tensor& query) {
  const Target target(query);
  cuda::drop_unused_strides(r.params);
  const cuda::BackwardPlan plan = kernels.plan_backward(r.params, call.most_group, target.device());
  const Tensor workspace = at::empty({plan.workspace_bytes}, query.options().dtype(at::kByte));
  check_launch(kernels.backward(r.params, plan, workspace.mutable_data_ptr(), target.device(), target.stream()));
}

Tensor grad_of_sinks(const Tensor& sinks, const Tensor& lse, const Tensor& delta) {
  return sink_terms(sinks, lse, delta).sum(at::IntArrayRef{0, 2}).to(sinks.scalar_type());
}

bool countable(const Tensor& query, int64_t kv_len) {
  // A count may be rounded up to whole steps, from a beginning that is rounded down to one.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 2 * cuda::kMostKeysOfStep;
  return query.size(1) <= kMost && query.size(2) <= kMost && kv_len <= kMost;
}

namespace {

// Reading kv_lens waits for the device. So kernels clamp the lengths, and calls check them only with ATTNPACK_CHECK=1.
void check_lengths_if_asked(const std::optional<Tensor>& kv_lens, int64_t kv_len) {
  if (!kv_lens || !checks_numbers()) return;
  const Tensor lens = kv_lens->to(at::kCPU, at::kLong).contiguous();
  check_kv_lens_values(lens.const_data_ptr<int64_t>(), lens.numel(), kv_len);
}

}  // namespace

AttentionResult attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionArguments& args) {
  check_attention(query, key, value, args);
  check_lengths_if_asked(args.kv_lens, key.size(2));
  if (args.key_index) return attend_selected_keys_cuda(query, key, value, args);
  const CudaKernels* kernels = cuda_kernels(query.device().index());
  if (!kernels || !countable(query, key.size(2))) return attention_composed(query, key, value, args);
  if (const auto result = attend_by_torch(*kernels, query, key, value, args)) return *result;
  CudaAttention call = prepare_cuda_attention(query, key, value, args);
  return run_cuda_forward(*kernels, call, query);
}

AttentionGradients attention_backward_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                           const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& lse, const AttentionArguments& args,
                                           bool mask_gradient, bool sinks_gradient) {
  check_attention_backward(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
  if (args.key_index)
    return differentiate_selected_keys_cuda(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient,
                                            sinks_gradient);
  const CudaKernels* kernels = cuda_kernels(query.device().index());
  if (!kernels || !countable(query, key.size(2)))
    return attention_backward_composed(grad_out, grad_lse, query, key, value, args, mask_gradient, sinks_gradient);
  if (const auto result = differentiate_by_torch(*kernels, grad_out, grad_lse, query, key, value, out, lse, args))
    return *result;
  const CudaAttention call = prepare_cuda_attention(query, key, value, args);
  PreparedBackward r = prepare_backward(call.prepared, grad_out, grad_lse, query, key, value, out, lse, mask_gradient);
  run_cuda_backward(*kernels, call, r, query);
  Tensor grad_mask = at::empty({0}, query.options());
  if (mask_gradient) grad_mask = r.grad_scores.sum_to_size(args.mask->sizes()).to(args.mask->scalar_type());
  return {r.grad_query, r.grad_key, r.grad_value, grad_mask,
          sinks_gradient ? grad_of_sinks(*args.sinks, lse, r.delta) : at::empty({0}, query.options())};
}

}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_cuda>);
  m.impl("attention_backward", attnpack::from_schema<attnpack::attention_backward_cuda>);
}
