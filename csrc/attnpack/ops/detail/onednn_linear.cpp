#include <attnpack/ops/detail/onednn_linear.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string_view>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/contiguous_rows.h>
#include <attnpack/ops/detail/linear_params.h>

namespace attnpack {
namespace {

using at::Tensor;

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

// Whether such a CPU multiplies vectors of 512 bits at once: Zen 5, which has AVX-VNNI. Zen 4 takes them in halves.
bool multiplies_whole_vectors() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx);
  return eax >> 4 & 1;
#else
  return false;
#endif
}

// The table, from `python benchmarks/linear_layers.py --all` on Zen 5 and Zen 4. Below this work a call of oneDNN costs
// more than it gains, and products with few outputs or short sums are MKL's.
struct Least {
  int64_t work, inputs, outputs;  // work: multiply-adds
};
const Least& least_of_float() {
  static const Least least{multiplies_whole_vectors() ? 1 << 21 : 1 << 23, 16, 64};
  return least;
}
constexpr Least kBiasedBFloat16{1 << 14, 1, 16};  // at::linear is oneDNN too, but copies the bias into each row first

// The most rows that our own kernel takes. For more than 16 rows it was measured faster than oneDNN
// only on Zen 5 (PERFORMANCE.md).
int64_t most_few_rows(at::ScalarType dtype) {
  if (!is_slow_with_mkl()) return 16;
  return dtype == at::kBFloat16 ? 32 : dtype == at::kFloat ? 24 : 16;
}

LinearKernel read_pinned() {
  const char* name = std::getenv("ATTNPACK_LINEAR");
  const std::string_view pinned = name ? name : "";
  if (pinned.empty()) return LinearKernel::kTable;
  if (pinned == "torch") return LinearKernel::kTorch;
  ATTNPACK_CHECK(pinned == "onednn", "ATTNPACK_LINEAR is '", pinned,
                 "', wants torch or onednn, or nothing for the faster one");
  ATTNPACK_CHECK(onednn_op(), "ATTNPACK_LINEAR is onednn, which this torch does not have: unset it");
  return LinearKernel::kOneDnn;
}

// Whether a condition on sizes holds, as far as is known: a traced graph may have sizes that nobody knows.
bool holds(const c10::SymBool& condition) { return TORCH_GUARD_OR_FALSE(condition); }

// Whether a matrix can be read in place: rows or columns are contiguous.
bool is_matrix(const Tensor& x) {
  if (x.dim() != 2) return false;
  const c10::SymInt rows = x.sym_size(0), columns = x.sym_size(1), of_row = x.sym_stride(0),
                    of_column = x.sym_stride(1);
  return (holds(of_column.sym_eq(1)) && holds(of_row.sym_ge(columns))) ||
         (holds(of_row.sym_eq(1)) && holds(of_column.sym_ge(rows)));
}

bool fits_onednn(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto dtype = input.scalar_type();
  const auto alike = [&](const Tensor& t) {
    return t.scalar_type() == dtype && t.is_cpu() && t.layout() == at::kStrided && !t.is_nested();
  };
  return onednn_op() && at::globalContext().userEnabledMkldnn() &&
         (dtype == at::kFloat || (dtype == at::kBFloat16 && has_wide_vectors())) && alike(input) && alike(weight) &&
         weight.dim() == 2 && input.dim() >= 1 && holds(input.sym_size(-1).sym_eq(weight.sym_size(1))) &&
         (!bias || (alike(*bias) && bias->dim() == 1 && holds(bias->sym_size(0).sym_eq(weight.sym_size(0))))) &&
         holds(input.sym_numel().sym_gt(0)) && holds(weight.sym_numel().sym_gt(0)) && is_matrix(weight);
}

// x [..., columns] as [rows, columns].
Tensor as_matrix(const Tensor& x) {
  const Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return is_matrix(rows) ? rows : rows.contiguous();
}

Tensor with_contiguous_rows(const Tensor& x) {
  return x.is_contiguous() || x.scalar_type() != at::kFloat || x.stride(0) != 1 ? x.contiguous() : contiguous_rows(x);
}

// oneDNN multiplies a weight whose rows or columns have gaps some 600 times as slowly, on AMD's processors with
// AVX-512.
Tensor without_gaps(const Tensor& weight) {
  const bool known = !weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return known && weight.t().is_contiguous() ? weight : weight.contiguous();
}

}  // namespace

LinearKernel pinned_linear_kernel() {
  static const LinearKernel kernel = read_pinned();
  return kernel;
}

bool takes_few_rows(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return pinned_linear_kernel() == LinearKernel::kTable && fits_few_rows(input, weight, bias) &&
         input.numel() / weight.size(1) <= most_few_rows(input.scalar_type());
}

bool will_take_few_rows(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return input.has_storage() && weight.has_storage() && !c10::impl::dispatch_mode_enabled() &&
         takes_few_rows(input, weight, bias);
}

bool takes_onednn(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const LinearKernel pinned = pinned_linear_kernel();
  if (pinned == LinearKernel::kTorch || !fits_onednn(input, weight, bias)) return false;
  if (pinned == LinearKernel::kOneDnn) return true;
  const bool is_float = input.scalar_type() == at::kFloat;
  const c10::SymInt outputs = weight.sym_size(0), inputs = weight.sym_size(1), numbers = input.sym_numel();
  if (is_float ? !is_slow_with_mkl() : !bias || !holds(numbers.sym_gt(inputs))) return false;
  const Least& least = is_float ? least_of_float() : kBiasedBFloat16;
  return holds(outputs.sym_ge(least.outputs)) && holds(inputs.sym_ge(least.inputs)) &&
         holds((numbers * outputs).sym_ge(least.work));
}

Tensor with_round_rows(const Tensor& rows) {
  if (rows.scalar_type() != at::kFloat || rows.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return rows;
  const int64_t count = rows.size(0);
  const int64_t step = std::max<int64_t>(8, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(count)) / 8));
  const int64_t padding = (count + step - 1) / step * step - count;
  return padding > 0 ? at::constant_pad_nd(rows, {0, 0, 0, padding}) : rows;
}

Tensor onednn_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  const Tensor rows = as_matrix(input);
  torch::jit::Stack stack;
  torch::jit::push(stack, with_contiguous_rows(with_round_rows(rows)), without_gaps(weight),
                   bias ? c10::IValue(bias->contiguous()) : c10::IValue(), "none",
                   c10::List<std::optional<at::Scalar>>(), "");
  onednn_op()->callBoxed(stack);
  return stack.front().toTensor().narrow(0, 0, rows.size(0)).view(shape);
}

std::string describe_linear_kernels() {
  switch (pinned_linear_kernel()) {
    case LinearKernel::kTorch:
      return "torch's linear, by ATTNPACK_LINEAR";
    case LinearKernel::kOneDnn:
      return "oneDNN for fp32 and bf16, by ATTNPACK_LINEAR";
    default:
      break;
  }
  const std::string few = "attnpack's for few rows, ";
  if (!onednn_op()) return few + "else torch's linear: this torch has no oneDNN";
  if (!is_slow_with_mkl()) return few + "oneDNN for bf16 with a bias, else torch's linear";
  return text_of({few, "oneDNN for fp32 from ", least_of_float().work,
                  " multiply-adds on, where MKL uses half of AVX-512 on this CPU, ",
                  "and for bf16 with a bias; else torch's linear"});
}

}  // namespace attnpack
