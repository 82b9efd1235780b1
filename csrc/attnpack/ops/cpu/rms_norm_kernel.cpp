#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/empty_result.h>
#include <attnpack/ops/rms_norm.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kNormRows = 32;  // rows of a unit

bool fits(const Tensor& x, const Tensor& weight) {
  const auto dtype = x.scalar_type();
  return (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) &&
         weight.scalar_type() == dtype && x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1) &&
         x.numel() > 0;
}

// The norm of x, or of sum = x + added, both contiguous.
Tensor normalised(const Tensor& x, const Tensor& weight, double eps, const Tensor* added, const Tensor* sum) {
  const Tensor out = empty_result(x.sizes(), x.options()), from = x.contiguous(), factors = weight.contiguous();
  RmsNormParams p{};
  if (added) {
    p.added = added->const_data_ptr();
    p.sum = sum->mutable_data_ptr();
  }
  p.dim = weight.size(0);
  p.dtype = kernel_dtype(x.scalar_type());
  p.eps = eps;
  p.x = from.const_data_ptr();
  p.weight = factors.const_data_ptr();
  p.out = out.mutable_data_ptr();
  const int64_t rows = x.numel() / p.dim;
  for_each_unit((rows + kNormRows - 1) / kNormRows, static_cast<double>(x.numel()), 0, [&](int64_t unit, void*) {
    kernels_in_use().rms_norm_rows(p, {unit * kNormRows, std::min((unit + 1) * kNormRows, rows)});
  });
  return out;
}

Tensor rms_norm_cpu(const Tensor& x, const Tensor& weight, double eps) {
  return fits(x, weight) ? normalised(x, weight, eps, nullptr, nullptr) : rms_norm_formula(x, weight, eps);
}

std::tuple<Tensor, Tensor> add_rms_norm_cpu(const Tensor& x, const Tensor& added, const Tensor& weight, double eps) {
  if (!fits(x, weight) || added.sizes() != x.sizes() || added.scalar_type() != x.scalar_type())
    return add_rms_norm_formula(x, added, weight, eps);
  const Tensor more = added.contiguous(), sum = empty_result(x.sizes(), x.options());
  const Tensor out = normalised(x, weight, eps, &more, &sum);
  return {sum, out};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("rms_norm", attnpack::rms_norm_cpu);
  m.impl("add_rms_norm", attnpack::add_rms_norm_cpu);
}
