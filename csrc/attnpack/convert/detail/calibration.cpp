#include <attnpack/convert/detail/calibration.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>

namespace attnpack::convert {

namespace {

constexpr double kRidge = 1e-6;  // of the mean square of an input

void check_rows(const char* name, const at::Tensor& rows) {
  ATTNPACK_CHECK(!rows.defined() || (rows.dim() == 2 && rows.is_floating_point() && rows.size(0) > 0), name,
                 ": got shape ", rows.sizes(), ", want floating rows [tokens, width], at least one");
}

}  // namespace

Calibration resolve_calibration(const Calibration& calibration) {
  auto result = calibration;
  check_rows("calibration", result.x);
  if (!result.context.defined()) result.context = result.x;
  check_rows("calibration context", result.context);
  if (!result.value_context.defined()) result.value_context = result.context;
  check_rows("calibration value_context", result.value_context);
  return result;
}

at::Tensor with_bias(const at::Tensor& weight, const at::Tensor& bias) {
  const auto exact = weight.to(at::kDouble);
  return bias.defined() ? at::cat({exact, bias.to(at::kDouble).unsqueeze(1)}, 1) : exact;
}

at::Tensor second_moment(const at::Tensor& inputs, int64_t width, bool bias, const at::Tensor& like) {
  const auto options = like.options().dtype(at::kDouble);
  if (!inputs.defined()) return at::eye(width, options);
  ATTNPACK_CHECK(inputs.size(1) == width - (bias ? 1 : 0), "calibration: got rows of width ", inputs.size(1), ", want ",
                 width - (bias ? 1 : 0), " as the projection reads");
  auto rows = inputs.to(options);
  if (bias) rows = at::cat({rows, at::ones({rows.size(0), 1}, options)}, 1);
  const auto moment = at::matmul(rows.t(), rows) / static_cast<double>(rows.size(0));
  ATTNPACK_CHECK(moment.isfinite().all().item<bool>(), "calibration: got numbers that are not finite");
  return moment + kRidge * moment.diagonal().mean() * at::eye(width, options);
}

at::Tensor output_moment(const at::Tensor& rows, const at::Tensor& moment) {
  // The large product stays real.
  const auto seen = rows.is_complex()
                        ? at::complex(at::matmul(at::real(rows), moment), at::matmul(at::imag(rows), moment))
                        : at::matmul(rows, moment);
  return at::matmul(seen, rows.mH());
}

}  // namespace attnpack::convert
