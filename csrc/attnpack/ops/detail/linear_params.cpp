#include <ATen/ATen.h>

#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/empty_result.h>
#include <attnpack/ops/detail/linear_params.h>
#include <attnpack/ops/linear.h>

namespace attnpack {

bool fits_few_rows(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto dtype = input.scalar_type();
  const auto alike = [&](const Tensor& t) { return t.scalar_type() == dtype && t.device() == input.device(); };
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && alike(weight) &&
         (!bias || (alike(*bias) && bias->dim() == 1 && bias->size(0) == weight.size(0))) && input.dim() >= 1 &&
         weight.dim() == 2 && weight.stride(1) == 1 && input.size(-1) == weight.size(1) &&
         weight.size(1) >= kFewRowsInputs && input.numel() > 0 && input.numel() / weight.size(1) <= kFewRows;
}

PreparedLinear prepare_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  PreparedLinear r;
  LinearParams& p = r.params;
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  r.rows = input.contiguous();
  r.out = empty_result(shape, input.options());
  p.rows = input.numel() / weight.size(1);
  p.inputs = weight.size(1);
  p.outputs = weight.size(0);
  p.dtype = kernel_dtype(input.scalar_type());
  p.input = r.rows.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  if (bias) p.bias = (r.bias = bias->contiguous()).const_data_ptr();
  p.out = r.out.mutable_data_ptr();
  return r;
}

}  // namespace attnpack
