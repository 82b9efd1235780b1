#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/linear_params.h>
#include <attnpack/ops/cpu/parallel.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kOutputs = 32;  // of a unit: a small layer has some for every thread

// One of the layers that read the same rows; its units follow those of the ones before it.
struct Layer {
  PreparedLinear prepared;
  int64_t end;  // of its units
};

// outs [..., out] of layers that fit, all in one go.
std::vector<Tensor> stream(const Tensor& input, at::TensorList weights, const std::optional<Tensor>* biases) {
  const Tensor rows = input.contiguous();
  std::vector<Tensor> outs;
  c10::SmallVector<Layer, 3> layers;
  int64_t units = 0, outputs = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    PreparedLinear prepared = prepare_linear(rows, weights[i], biases[i]);
    outs.push_back(prepared.out);
    outputs += prepared.params.outputs;
    units += (prepared.params.outputs + kOutputs - 1) / kOutputs;
    layers.push_back({std::move(prepared), units});
  }
  const auto& kernels = kernels_in_use();
  const LinearParams& any = layers.front().prepared.params;
  // A weight that comes from memory takes as long as some multiply-adds.
  for_each_unit(units, static_cast<double>(any.rows + 3) * any.inputs * outputs, kernels.linear_scratch(any),
                [&](int64_t unit, void* scratch) {
                  size_t i = 0;
                  while (unit >= layers[i].end) ++i;
                  const auto& p = layers[i].prepared.params;
                  const int64_t begin = (unit - (i == 0 ? 0 : layers[i - 1].end)) * kOutputs;
                  kernels.linear_rows(p, {begin, std::min(begin + kOutputs, p.outputs)}, scratch);
                });
  return outs;
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return fits_few_rows(input, weight, bias) ? stream(input, weight, &bias).front() : at::linear(input, weight, bias);
}

std::vector<Tensor> linears_cpu(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  bool all_fit = !weights.empty() && (biases.empty() || biases.size() == weights.size());
  c10::SmallVector<std::optional<Tensor>, 3> offsets(weights.size());
  for (size_t i = 0; all_fit && i < weights.size(); ++i) {
    if (!biases.empty()) offsets[i] = biases[i];
    all_fit = fits_few_rows(input, weights[i], offsets[i]);
  }
  return all_fit ? stream(input, weights, offsets.data()) : linears_formula(input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("linear", attnpack::linear_cpu);
  m.impl("linears", attnpack::linears_cpu);
}
