#include <attnpack/ops/cpu/onednn_linear.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdlib>

#include <attnpack/core/check.h>

namespace attnpack {
namespace {

using at::Tensor;

// Measured on Zen 5: `python benchmarks/linear_layers.py` compares the kernels. Below this work a call of oneDNN costs
// more than it gains.
constexpr int64_t kLeastWork = 1 << 21;      // multiply-adds in fp32
constexpr int64_t kLeastWidth = 16;          // of inputs and outputs: thin products are MKL's
constexpr int64_t kLeastBiasWork = 1 << 14;  // in bf16, where at::linear is oneDNN too, but copies the bias to each row

const std::optional<c10::OperatorHandle>& onednn_op() {
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  return op;
}

bool has_wide_vectors() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

// MKL gives CPUs of other makers than Intel vectors of half the width of AVX-512.
bool is_slow_with_mkl() {
#if defined(__x86_64__)
  return has_wide_vectors() && !__builtin_cpu_is("intel") && at::hasMKL();
#else
  return false;
#endif
}

LinearKernel read_pinned() {
  const char* name = std::getenv("ATTNPACK_LINEAR");
  if (!name || !*name) return LinearKernel::kTable;
  if (std::string(name) == "torch") return LinearKernel::kTorch;
  ATTNPACK_CHECK(std::string(name) == "onednn", "ATTNPACK_LINEAR is '", name,
                 "', wants torch or onednn, or nothing for the faster one");
  ATTNPACK_CHECK(onednn_op(), "ATTNPACK_LINEAR is onednn, which this torch does not have: unset it");
  return LinearKernel::kOneDnn;
}

// Whether a matrix can be read in place: rows or columns are contiguous.
bool is_matrix(const Tensor& x) {
  return x.dim() == 2 && ((x.sym_stride(1) == 1 && x.sym_stride(0) >= x.sym_size(1)) ||
                          (x.sym_stride(0) == 1 && x.sym_stride(1) >= x.sym_size(0)));
}

bool fits_onednn(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto dtype = input.scalar_type();
  const auto alike = [&](const Tensor& t) {
    return t.scalar_type() == dtype && t.is_cpu() && t.layout() == at::kStrided && !t.is_nested();
  };
  return onednn_op() && (dtype == at::kFloat || (dtype == at::kBFloat16 && has_wide_vectors())) && alike(input) &&
         alike(weight) && weight.dim() == 2 && input.dim() >= 1 && input.sym_size(-1) == weight.sym_size(1) &&
         (!bias || (alike(*bias) && bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0))) &&
         input.sym_numel() > 0 && weight.sym_numel() > 0 && is_matrix(weight);
}

// x [..., columns] as [rows, columns].
Tensor as_matrix(const Tensor& x) {
  const Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return is_matrix(rows) ? rows : rows.contiguous();
}

}  // namespace

LinearKernel pinned_linear_kernel() {
  static const LinearKernel kernel = read_pinned();
  return kernel;
}

bool takes_onednn(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const LinearKernel pinned = pinned_linear_kernel();
  if (pinned == LinearKernel::kTorch || !fits_onednn(input, weight, bias)) return false;
  if (pinned == LinearKernel::kOneDnn) return true;
  const auto work = input.sym_numel() * weight.sym_size(0);
  if (input.scalar_type() == at::kFloat)
    return is_slow_with_mkl() && work >= kLeastWork && weight.sym_size(0) >= kLeastWidth &&
           weight.sym_size(1) >= kLeastWidth;
  return bias && work >= kLeastBiasWork && input.sym_numel() > weight.sym_size(1);
}

Tensor onednn_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  torch::jit::Stack stack;
  torch::jit::push(stack, as_matrix(input), weight, bias ? c10::IValue(bias->contiguous()) : c10::IValue(), "none",
                   c10::List<std::optional<at::Scalar>>(), "");
  onednn_op()->callBoxed(stack);
  return stack.front().toTensor().view(shape);
}

std::string describe_linear_kernels() {
  switch (pinned_linear_kernel()) {
    case LinearKernel::kTorch:
      return "torch's linear, by ATTNPACK_LINEAR";
    case LinearKernel::kOneDnn:
      return "oneDNN, by ATTNPACK_LINEAR";
    default:
      break;
  }
  if (!onednn_op()) return "torch's linear: this torch has no oneDNN";
  if (!is_slow_with_mkl()) return "torch's linear, and oneDNN for bf16 with a bias";
  return "oneDNN for fp32 from " + std::to_string(kLeastWork) +
         " multiply-adds on, where MKL uses half of AVX-512 on this CPU, and for bf16 with a bias; else torch's linear";
}

}  // namespace attnpack
