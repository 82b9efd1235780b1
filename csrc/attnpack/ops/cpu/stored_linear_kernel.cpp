#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/empty_result.h>
#include <attnpack/ops/detail/stored_layout.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/stored_linear.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

// Outputs of a unit that multiplies. Each unit costs an atomic instruction, which waits for the loads before it.
constexpr int64_t kMostStoredOutputs = 8 * kStoredOutputs;
int64_t stored_outputs_of_unit(int64_t outputs) {
  return std::clamp(outputs / (8 * loop_threads()) / kStoredOutputs * kStoredOutputs, kStoredOutputs,
                    kMostStoredOutputs);
}

constexpr int64_t kWidenedBytes = 4 << 20;     // of a part of the weight that is widened
constexpr int64_t kWidenedNumbers = 16 << 10;  // of a unit that widens rows

// The last two dims as they lie in files; rows may lie further apart.
Tensor with_whole_rows(const Tensor& weight) {
  return weight.stride(2) == 1 && weight.stride(1) == weight.size(2) ? weight : weight.contiguous();
}

Tensor widen_stored_cpu(const Tensor& given, at::ScalarType dtype) {
  const auto& layout = widened_layout(given, dtype);
  const Tensor blocks = with_whole_rows(given);
  const int64_t inputs = blocks.size(1) * layout.numbers, rows = blocks.size(0);
  const Tensor out = at::empty({rows, inputs}, blocks.options().dtype(dtype));
  if (out.numel() == 0) return out;
  StoredRowsParams p{};
  p.inputs = inputs;
  p.format = layout.format;
  p.dtype = kernel_dtype(dtype);
  p.rows = blocks.const_data_ptr<uint8_t>();
  p.row_bytes = blocks.stride(0);
  p.out = out.mutable_data_ptr();
  const auto& kernels = kernels_in_use();
  const int64_t step = std::max<int64_t>(1, kWidenedNumbers / inputs);
  for_each_unit((rows + step - 1) / step, static_cast<double>(out.numel()), 0, [&](int64_t unit, void*) {
    kernels.widen_stored_rows(p, {unit * step, std::min((unit + 1) * step, rows)});
  });
  return out;
}

// By weights that are widened part by part.
Tensor multiply_widened(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t outputs = weight.size(0), row_bytes = std::max<int64_t>(1, input.size(-1) * input.element_size());
  const int64_t step = std::max<int64_t>(64, kWidenedBytes / row_bytes);
  if (outputs <= step) return attnpack::linear(input, widen_stored_cpu(weight, input.scalar_type()), bias);
  auto shape = input.sizes().vec();
  shape.back() = outputs;
  const Tensor out = at::empty(shape, input.options());
  for (int64_t begin = 0; begin < outputs; begin += step) {
    const int64_t count = std::min(step, outputs - begin);
    const Tensor part = widen_stored_cpu(weight.narrow(0, begin, count), input.scalar_type());
    const auto part_bias = bias ? std::optional(bias->narrow(0, begin, count)) : std::nullopt;
    out.narrow(-1, begin, count).copy_(attnpack::linear(input, part, part_bias));
  }
  return out;
}

// One of the layers that read the same rows. Its units follow those of the layers before it.
struct StoredLayer {
  StoredLinearParams params{};
  Tensor weight, bias;
  int64_t parts, end;  // its units: `parts` for each kStoredRows rows
};

// By rounded rows, in one pass over the weights.
std::vector<Tensor> multiply_rounded(const Tensor& input, at::TensorList weights, const std::optional<Tensor>* biases) {
  const Tensor rows = input.contiguous();
  const int64_t inputs = input.size(-1), count = input.numel() / inputs;
  c10::SmallVector<RoundedBlock, 64> rounded;  // on the stack for a row of few numbers
  rounded.resize_for_overwrite(count * (inputs / kRoundedBlock));
  c10::SmallVector<StoredLayer, 3> layers;
  std::vector<Tensor> outs;
  outs.reserve(weights.size());
  at::DimVector shape(input.sizes());
  int64_t units = 0, outputs = 0;
  for (const Tensor& weight : weights) outputs += weight.size(0);
  const int64_t step = stored_outputs_of_unit(outputs);
  for (size_t i = 0; i < weights.size(); ++i) {
    shape.back() = weights[i].size(0);
    outs.push_back(empty_result(shape, input.options()));
    StoredLayer& layer = layers.emplace_back();
    layer.weight = with_whole_rows(weights[i]);
    StoredLinearParams& p = layer.params;
    p.rows = count;
    p.inputs = inputs;
    p.outputs = weights[i].size(0);
    p.format = stored_layout("weight", weights[i]).format;
    p.dtype = kernel_dtype(input.scalar_type());
    p.input = rows.const_data_ptr();
    p.rounded = rounded.data();
    p.weight = layer.weight.const_data_ptr<uint8_t>();
    p.row_bytes = layer.weight.stride(0);
    if (biases[i]) p.bias = (layer.bias = biases[i]->contiguous()).const_data_ptr();
    p.out = outs.back().mutable_data_ptr();
    layer.parts = (p.outputs + step - 1) / step;
    layer.end = units += layer.parts * ((count + kStoredRows - 1) / kStoredRows);
    if (i > 0) layers[i - 1].params.following = p.weight;
  }
  const auto& kernels = kernels_in_use();
  const StoredLinearParams& any = layers.front().params;
  for_each_unit((count + kRoundedRows - 1) / kRoundedRows, static_cast<double>(count * inputs), 0,
                [&](int64_t unit, void*) {
                  kernels.round_input(any, {unit * kRoundedRows, std::min((unit + 1) * kRoundedRows, count)});
                });
  const auto unit_of_layers = [&](int64_t unit, void* scratch) {
    size_t i = 0;
    while (unit >= layers[i].end) ++i;
    const StoredLayer& layer = layers[i];
    const int64_t layer_unit = unit - (i == 0 ? 0 : layers[i - 1].end), row = layer_unit / layer.parts * kStoredRows,
                  output = layer_unit % layer.parts * step;
    kernels.stored_linear_rows(layer.params, {row, std::min(row + kStoredRows, count)},
                               {output, std::min(output + step, layer.params.outputs)}, scratch);
  };
  // Reading a weight from memory takes as long as some multiply-adds.
  for_each_unit(units, static_cast<double>(count + 3) * static_cast<double>(inputs * outputs),
                kernels.stored_linear_scratch(any), unit_of_layers, true);
  return outs;
}

bool rounds_input(const Tensor& input, std::optional<bool> round_input) {
  if (input.scalar_type() == at::kDouble) {
    ATTNPACK_CHECK(!round_input.value_or(false), "round_input: got true for an input of float64, which is never ",
                   "rounded: call .float() on it, or leave round_input out");
    return false;
  }
  return input.numel() > 0 && round_input.value_or(kernels_in_use().has_byte_products());
}

Tensor stored_linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                         std::optional<bool> round_input) {
  check_stored_linear(input, weight, bias);
  if (!rounds_input(input, round_input)) return multiply_widened(input, weight, bias);
  return multiply_rounded(input, weight, &bias).front();
}

Tensor one_stored_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return stored_linear_cpu(input, weight, bias, {});
}

std::vector<Tensor> stored_linears_cpu(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  c10::SmallVector<std::optional<Tensor>, 3> offsets(weights.size());
  const bool paired = biases.empty() || biases.size() == weights.size();
  for (size_t i = 0; paired && i < weights.size(); ++i) {
    if (!biases.empty()) offsets[i] = biases[i];
    check_stored_linear(input, weights[i], offsets[i]);
  }
  if (!paired || weights.empty() || !rounds_input(input, {}))
    return each_linear(one_stored_cpu, input, weights, biases);
  return multiply_rounded(input, weights, offsets.data());
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("stored_linear", attnpack::stored_linear_cpu);
  m.impl("stored_linears", attnpack::stored_linears_cpu);
  m.impl("widen_stored", attnpack::widen_stored_cpu);
}
