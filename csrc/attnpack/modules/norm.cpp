#include <attnpack/modules/norm.h>

#include <ATen/OpMathType.h>

#include <cmath>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/ops/rms_norm.h>

namespace attnpack {

namespace {

template <typename Options>
void check_norm(const Options& options) {
  check_size("dim", options.dim());
  check_eps("eps", options.eps());
}

}  // namespace

RMSNormImpl::RMSNormImpl(RMSNormOptions options) : options(std::move(options)) { reset(); }

void RMSNormImpl::reset() {
  check_norm(options);
  const double start = options.plus_one() ? 0 : 1;
  register_parameter("weight", allocate("dim", {options.dim()}, weight, options.factory()).fill_(start));
  bind_members();
}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  check_tokens("x", x, options.dim(), {});
  if (!options.plus_one()) return rms_norm(x, weight, options.eps());
  // 16-bit numbers near 1 are too coarse for 1 + weight.
  const auto wide = at::toOpMathType(x.scalar_type());
  return rms_norm(x.to(wide), weight.to(wide) + 1, options.eps()).to(x.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> RMSNormImpl::forward_sum(const at::Tensor& x, const at::Tensor& added) {
  if (options.plus_one() || x.sizes() != added.sizes() || x.scalar_type() != added.scalar_type())
    return TokenModule::forward_sum(x, added);
  check_tokens("x", x, options.dim(), {});
  return add_rms_norm(x, added, weight, options.eps());
}

void RMSNormImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::RMSNorm", options); }

LayerNormImpl::LayerNormImpl(LayerNormOptions options) : options(std::move(options)) { reset(); }

void LayerNormImpl::reset() {
  check_norm(options);
  register_parameter("weight", allocate("dim", {options.dim()}, weight, options.factory()).fill_(1));
  if (options.bias()) register_parameter("bias", allocate("dim", {options.dim()}, bias, options.factory()).zero_());
  bind_members();
}

void LayerNormImpl::bind_members() {
  weight = parameters_["weight"];
  bias = options.bias() ? parameters_["bias"] : at::Tensor();
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  check_tokens("x", x, options.dim(), weight);
  const auto given = bias.defined() ? std::make_optional(bias) : std::nullopt;
  return at::layer_norm(x, {options.dim()}, weight, given, options.eps());
}

void LayerNormImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::LayerNorm", options); }

Part<TokenModule> make_norm(const std::string& kind, const NormOptions& options) {
  check_norm_kind(kind);
  if (kind.starts_with("layer"))
    return LayerNorm(
        LayerNormOptions(options.dim()).eps(options.eps()).bias(kind == "layer").factory(options.factory()));
  const bool plus_one = kind == "rms_plus_one";
  return RMSNorm(RMSNormOptions(options.dim()).eps(options.eps()).plus_one(plus_one).factory(options.factory()));
}

}  // namespace attnpack
