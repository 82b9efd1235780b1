#include <attnpack/modules/linear.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/stored_linear.h>

#include <c10/util/SmallVector.h>
#include <torch/nn/init.h>

#include <attnpack/modules/detail/print_options.h>
#include <algorithm>
#include <cmath>

namespace attnpack {

LinearImpl::LinearImpl(LinearOptions options) : options(std::move(options)) { reset(); }

void LinearImpl::reset() {
  const auto out = options.out_features(), in = options.in_features();
  ATTNPACK_CHECK(in >= 0, "in_features: got ", in, ", want 0 or more");
  ATTNPACK_CHECK(out >= 0, "out_features: got ", out, ", want 0 or more");
  if (is_stored(weight))  // of the module that this one is cloned from
    register_parameter("weight", at::empty_like(weight), /*requires_grad=*/false);
  else
    register_parameter("weight", allocate("out_features and in_features", {out, in}, weight, options.factory()));
  if (options.bias()) register_parameter("bias", allocate("out_features", {out}, bias, options.factory()));
  bind_members();
  reset_parameters();
}

void LinearImpl::reset_parameters() {
  if (weight.is_meta() || is_stored(weight))
    return;  // nothing to fill, and uniform_ is slow to find that out (PERFORMANCE.md)
  const double bound = options.in_features() > 0 ? 1 / std::sqrt(static_cast<double>(options.in_features())) : 0;
  torch::nn::init::uniform_(weight, -bound, bound);
  if (bias.defined()) torch::nn::init::uniform_(bias, -bound, bound);
}

void LinearImpl::bind_members() {
  weight = parameters_["weight"];
  bias = options.bias() ? parameters_["bias"] : at::Tensor();
}

bool holds_weight(const at::Tensor& tensor, int64_t rows, int64_t columns) {
  if (is_stored(tensor)) return tensor.size(0) == rows && stored_inputs(tensor) == columns;
  return tensor.sizes() == at::IntArrayRef{rows, columns} && tensor.is_floating_point();
}

bool LinearImpl::takes(const std::string& name, const at::Tensor& tensor) const {
  return name == "weight" && !share && holds_weight(tensor, options.out_features(), options.in_features());
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  if (share) return share->forward(x, weight, bias);
  const auto offset = bias.defined() ? std::optional(bias) : std::nullopt;
  return is_stored(weight) ? stored_linear(x, weight, offset) : attnpack::linear(x, weight, offset);
}

std::vector<at::Tensor> forward_all(const at::Tensor& x, std::initializer_list<const LinearImpl*> layers) {
  c10::SmallVector<at::Tensor, 3> weights, biases;
  for (const auto* layer : layers) {
    weights.push_back(layer->weight);
    if (layer->bias.defined()) biases.push_back(layer->bias);
  }
  const auto stored = std::count_if(weights.begin(), weights.end(), is_stored);
  if (stored > 0 && stored < static_cast<int64_t>(weights.size())) {
    std::vector<at::Tensor> outs;
    for (const auto* layer : layers) outs.push_back(const_cast<LinearImpl*>(layer)->forward(x));
    return outs;
  }
  const auto& share = (*layers.begin())->share;
  const auto input = share ? share->enter(x) : x;
  return stored ? stored_linears(input, weights, biases) : attnpack::linears(input, weights, biases);
}

void LinearImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::Linear", options); }

}  // namespace attnpack
