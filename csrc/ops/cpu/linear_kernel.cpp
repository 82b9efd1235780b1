#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/attention_params.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/parallel.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kOutputs = 32;  // of a unit: a small layer has some for every thread

bool fits(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto dtype = input.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && weight.scalar_type() == dtype &&
         (!bias || (bias->scalar_type() == dtype && bias->dim() == 1 && bias->size(0) == weight.size(0))) &&
         input.dim() >= 1 && weight.dim() == 2 && weight.stride(1) == 1 && input.size(-1) == weight.size(1) &&
         weight.size(1) > 0 && input.numel() > 0 && input.numel() / weight.size(1) <= kFewRows;
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!fits(input, weight, bias)) return at::linear(input, weight, bias);
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  const Tensor out = at::empty(shape, input.options()), rows = input.contiguous();
  const Tensor offsets = bias ? bias->contiguous() : Tensor();
  LinearParams p{};
  p.rows = input.numel() / weight.size(1);
  p.inputs = weight.size(1);
  p.outputs = weight.size(0);
  p.dtype = kernel_dtype(input.scalar_type());
  p.input = rows.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.bias = bias ? offsets.const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  const auto& kernels = kernels_in_use();
  // A weight that comes from memory takes as long as some multiply-adds.
  for_each_unit((p.outputs + kOutputs - 1) / kOutputs, static_cast<double>(p.rows + 3) * p.inputs * p.outputs,
                kernels.linear_scratch(p), [&](int64_t unit, void* scratch) {
                  kernels.linear_rows(p, {unit * kOutputs, std::min((unit + 1) * kOutputs, p.outputs)}, scratch);
                });
  return out;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("linear", attnpack::linear_cpu); }
