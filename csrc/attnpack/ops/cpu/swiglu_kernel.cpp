#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/empty_result.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/swiglu.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kNumbers = 16 << 10;  // of a unit
constexpr double kWork = 8;             // of a number, in multiply-adds

Tensor swiglu_cpu(const Tensor& gate, const Tensor& up) {
  const auto dtype = gate.scalar_type();
  if (!is_element(dtype) || up.scalar_type() != dtype || gate.sizes() != up.sizes() || gate.numel() == 0)
    return swiglu_formula(gate, up);
  const Tensor g = gate.contiguous(), u = up.contiguous(), out = empty_result(gate.sizes(), gate.options());
  SwigluParams p{};
  p.dtype = kernel_dtype(dtype);
  p.gate = g.const_data_ptr();
  p.up = u.const_data_ptr();
  p.out = out.mutable_data_ptr();
  const int64_t count = gate.numel();
  for_each_unit((count + kNumbers - 1) / kNumbers, kWork * static_cast<double>(count), 0, [&](int64_t unit, void*) {
    kernels_in_use().swiglu(p, {unit * kNumbers, std::min((unit + 1) * kNumbers, count)});
  });
  return out;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("swiglu", attnpack::swiglu_cpu); }
