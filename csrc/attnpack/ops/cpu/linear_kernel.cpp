#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <utility>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/linear_params.h>
#include <attnpack/ops/detail/onednn_linear.h>
#include <attnpack/ops/linear.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

using at::Tensor;

// The number of outputs of a unit. It is small, so that all threads end together, and smaller if some would have none.
constexpr int64_t kFewestOutputs = 4, kOutputs = 16, kMostOutputs = 64;
int64_t outputs_of_unit(int64_t outputs) {
  const int64_t threads = loop_threads(), share = outputs / threads / kFewestOutputs * kFewestOutputs;
  if (share < kOutputs) return std::max(share, kFewestOutputs);
  return std::clamp(outputs / (8 * threads) / kOutputs * kOutputs, kOutputs, kMostOutputs);
}

// One of the layers that read the same rows. Its units follow those of the layers before it.
struct StreamedLinear {
  PreparedLinear prepared;
  int64_t end;  // of its units
};

// Makes one output of many rows many outputs of one row, by the same products: weights are read faster than inputs are.
void swap_roles(PreparedLinear& layer) {
  LinearParams& p = layer.params;
  std::swap(p.rows, p.outputs);
  std::swap(p.input, p.weight);
  p.weight_stride = p.inputs;
  if (p.bias) p.bias = (layer.bias = layer.bias.expand({p.outputs}).contiguous()).const_data_ptr();
}

// Computes the outputs [..., out] of layers that fit, in one pass over the weights.
std::vector<Tensor> multiply_few_rows(const Tensor& input, at::TensorList weights,
                                      const std::optional<Tensor>* biases) {
  const Tensor rows = input.contiguous();
  std::vector<Tensor> outs;
  c10::SmallVector<StreamedLinear, 3> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    layers.push_back({prepare_linear(rows, weights[i], biases[i]), 0});
    outs.push_back(layers.back().prepared.out);
  }
  if (layers.size() == 1 && weights.front().size(0) == 1) swap_roles(layers.front().prepared);
  int64_t units = 0, outputs = 0;
  for (const auto& layer : layers) outputs += layer.prepared.params.outputs;
  const int64_t step = outputs_of_unit(outputs);
  for (auto& layer : layers) layer.end = units += (layer.prepared.params.outputs + step - 1) / step;
  const auto& kernels = kernels_in_use();
  const LinearParams& any = layers.front().prepared.params;
  // Reading a weight from memory takes as long as some multiply-adds.
  const auto unit_of_layers = [&](int64_t unit, void* scratch) {
    size_t i = 0;
    while (unit >= layers[i].end) ++i;
    const auto& p = layers[i].prepared.params;
    const int64_t begin = (unit - (i == 0 ? 0 : layers[i - 1].end)) * step;
    kernels.linear_rows(p, {begin, std::min(begin + step, p.outputs)}, scratch);
  };
  for_each_unit(units, static_cast<double>(any.rows + 3) * any.inputs * outputs, kernels.linear_scratch(any),
                unit_of_layers, true);
  return outs;
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (takes_few_rows(input, weight, bias)) return multiply_few_rows(input, weight, &bias).front();
  return takes_onednn(input, weight, bias) ? onednn_linear(input, weight, bias) : linear_formula(input, weight, bias);
}

std::vector<Tensor> linears_cpu(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  bool all_fit = !weights.empty() && (biases.empty() || biases.size() == weights.size());
  c10::SmallVector<std::optional<Tensor>, 3> offsets(weights.size());
  for (size_t i = 0; all_fit && i < weights.size(); ++i) {
    if (!biases.empty()) offsets[i] = biases[i];
    all_fit = takes_few_rows(input, weights[i], offsets[i]);
  }
  return all_fit ? multiply_few_rows(input, weights, offsets.data()) : each_linear(linear_cpu, input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("linear", attnpack::linear_cpu);
  m.impl("linears", attnpack::linears_cpu);
}
