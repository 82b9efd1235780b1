#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/sequences.h>
#include <attnpack/threads/threads.h>

#include <algorithm>

namespace attnpack {
namespace {

int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The kernels' params, and the tensors and lengths that they point to.
struct PreparedConvolution {
  CausalConv1dParams params{};
  Tensor x, weight, bias, initial_state;
  SequenceLengths lengths;
  double work;  // multiply-adds

  PreparedConvolution(const Tensor& given, const Tensor& taps, const CausalConv1dArguments& args)
      : x(unit_last_stride(given)), weight(taps.to(accumulation_type(given)).contiguous()) {
    CausalConv1dParams& p = params;
    p.length = given.size(1);
    p.channels = given.size(2);
    p.taps = taps.size(1);
    p.dtype = kernel_dtype(given.scalar_type());
    p.silu = args.silu;
    p.x = x.const_data_ptr();
    p.x_batch_stride = x.stride(0);
    p.x_row_stride = x.stride(1);
    p.weight = weight.const_data_ptr();
    if (args.bias) {
      bias = args.bias->to(weight.scalar_type()).contiguous();
      p.bias = bias.const_data_ptr();
    }
    if (args.initial_state) {
      initial_state = rows_of_state(*args.initial_state);
      p.initial_state = initial_state.const_data_ptr();
    }
    lengths.read(p, args, given.size(0), "x");
    work = static_cast<double>(given.numel()) * static_cast<double>(p.taps);
  }

  // A state [N, C, K - 1] as the kernels read it, [N, K - 1, C].
  Tensor rows_of_state(const Tensor& state) const { return state.to(x.scalar_type()).transpose(1, 2).contiguous(); }

  // A result like x; padding gives 0.
  Tensor empty_rows() const {
    return lengths.has_padding() ? at::zeros(x.sizes(), x.options()) : at::empty(x.sizes(), x.options());
  }
  Range channels(int64_t block) const {
    return {block * kConvChannels, std::min((block + 1) * kConvChannels, params.channels)};
  }
};

CausalConv1dResult causal_conv1d_cpu(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  check_causal_conv1d(x, weight, args);
  PreparedConvolution call(x, weight, args);
  CausalConv1dParams& p = call.params;
  const Tensor out = call.empty_rows();
  const Tensor state = empty_conv_state(conv_state_shape(x, weight, args), x.options());
  p.out = out.mutable_data_ptr();
  p.state = state.mutable_data_ptr();
  const int64_t blocks = pieces(p.channels, kConvChannels);
  int64_t longest = 1;  // a sequence without tokens has a state, too
  for (int64_t n = 0; n < p.sequences; ++n) longest = std::max(longest, call.lengths.tokens(n));
  const int64_t chunks = pieces(longest, kConvTokens);
  const Kernels& kernels = kernels_in_use();
  for_each_unit(p.sequences * blocks * chunks, call.work, kernels.causal_conv1d_scratch(p),
                [&](int64_t unit, void* scratch) {
                  const int64_t sequence = unit / (blocks * chunks), begin = unit / blocks % chunks * kConvTokens;
                  const int64_t count = call.lengths.tokens(sequence);
                  if (begin > 0 && begin >= count) return;
                  kernels.causal_conv1d(p, sequence, {begin, std::min(begin + kConvTokens, count)},
                                        call.channels(unit % blocks), scratch);
                });
  return {laid_as_rows(x, out), state};
}

CausalConv1dGradients causal_conv1d_backward_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                 const Tensor& x, const Tensor& weight,
                                                 const CausalConv1dArguments& args) {
  check_causal_conv1d_backward(grad_out, grad_state, x, weight, args);
  const PreparedConvolution call(x, weight, args);
  const CausalConv1dParams& p = call.params;
  const Tensor upstream = grad_out.to(x.scalar_type()).contiguous();
  const Tensor last = grad_state ? call.rows_of_state(*grad_state) : Tensor();
  const Tensor of_x = call.empty_rows();
  const Tensor of_weight = at::empty({p.sequences, p.taps, p.channels}, call.weight.options());
  const Tensor of_bias = at::empty({p.sequences, p.channels}, call.weight.options());
  const Tensor of_state =
      args.initial_state ? empty_conv_state(args.initial_state->sym_sizes(), x.options()) : Tensor();
  CausalConv1dBackwardParams bp{};
  bp.forward = p;
  bp.grad_out = upstream.const_data_ptr();
  bp.grad_state = last.defined() ? last.const_data_ptr() : nullptr;
  bp.grad_x = of_x.mutable_data_ptr();
  bp.grad_weight = of_weight.mutable_data_ptr();
  bp.grad_bias = of_bias.mutable_data_ptr();
  bp.grad_initial_state = of_state.defined() ? of_state.mutable_data_ptr() : nullptr;
  const int64_t blocks = pieces(p.channels, kConvChannels);
  const Kernels& kernels = kernels_in_use();
  for_each_unit(p.sequences * blocks, 3 * call.work, kernels.causal_conv1d_backward_scratch(bp),
                [&](int64_t unit, void* scratch) {
                  kernels.causal_conv1d_backward(bp, unit / blocks, call.channels(unit % blocks), scratch);
                });
  const auto none = [&] { return at::empty({0}, x.options()); };
  return {laid_as_rows(x, of_x), of_weight.sum(0).transpose(0, 1).to(weight.scalar_type()).contiguous(),
          args.bias ? of_bias.sum(0).to(args.bias->scalar_type()) : none(),
          args.initial_state ? of_state.to(args.initial_state->scalar_type()) : none()};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("causal_conv1d", attnpack::from_schema<attnpack::causal_conv1d_cpu>);
  m.impl("causal_conv1d_backward", attnpack::from_schema<attnpack::causal_conv1d_backward_cpu>);
}
