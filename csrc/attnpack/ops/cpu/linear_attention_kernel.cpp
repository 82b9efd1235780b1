#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/sequences.h>
#include <attnpack/threads/threads.h>

#include <limits>

namespace attnpack {
namespace {

// The kernels' params, and the tensors and lengths that they point to.
struct PreparedRecurrence {
  LinearAttentionParams params{};
  Tensor query, key, value, log_decay, beta, initial_state;
  SequenceLengths lengths;
  int32_t positive_decays = 0;
  double work = 0;  // multiply-adds with the states

  PreparedRecurrence(const Tensor& q, const Tensor& k, const Tensor& v, const LinearAttentionArguments& args)
      : query(unit_last_stride(q)), key(unit_last_stride(k)), value(unit_last_stride(v)) {
    const auto wide = accumulation_type(q);
    LinearAttentionParams& p = params;
    p.shared_heads = 1;
    p.num_heads = v.size(1);
    p.num_key_heads = q.size(1);
    p.length = q.size(2);
    p.head_dim = q.size(3);
    p.v_head_dim = v.size(3);
    p.dtype = kernel_dtype(q.scalar_type());
    p.scale = linear_scale(q, args);
    p.query = query.const_data_ptr();
    p.key = key.const_data_ptr();
    p.value = value.const_data_ptr();
    p.query_strides = kernel_strides(query);
    p.key_strides = kernel_strides(key);
    p.value_strides = kernel_strides(value);
    const auto strides = [](const Tensor& x) { return Strides{x.stride(0), x.stride(1), x.stride(2), 1}; };
    if (args.log_decay) {
      log_decay = args.log_decay->to(wide);
      p.per_channel = log_decay.dim() == 4;
      if (p.per_channel) log_decay = unit_last_stride(log_decay);
      p.log_decay = log_decay.const_data_ptr();
      p.log_decay_strides = strides(log_decay);
      p.positive_decays = &positive_decays;
    }
    if (args.beta) {
      beta = args.beta->to(wide);
      p.beta = beta.const_data_ptr();
      p.beta_strides = strides(beta);
    }
    if (args.initial_state) {
      initial_state = args.initial_state->to(wide).contiguous();
      p.initial_state = initial_state.const_data_ptr();
    }
    lengths.read(p, args, q.size(0), "query");
    work = static_cast<double>(q.size(0)) * static_cast<double>(p.num_heads * p.length * p.head_dim * p.v_head_dim) * 3;
  }
};

// How many value heads of a key head one unit computes: a divisor of their number, so that threads have enough units.
int64_t shared_heads(const LinearAttentionParams& p) {
  constexpr int64_t kMost = 8, kUnitsPerThread = 4;
  const int64_t group = p.num_heads / p.num_key_heads, units = kUnitsPerThread * loop_threads();
  int64_t shared = std::clamp<int64_t>(p.sequences * p.num_heads / units, 1, std::min(kMost, group));
  while (group % shared != 0) --shared;
  return shared;
}

// The largest log decay of a valid token, at least 0.
template <class T>
double largest_log_decay(const PreparedRecurrence& call) {
  const LinearAttentionParams& p = call.params;
  const int64_t channels = p.per_channel ? p.head_dim : 1;
  T most = 0;
  for (int64_t b = 0; b < call.log_decay.size(0); ++b) {
    const int64_t valid = call.lengths.lens.empty() ? p.length : call.lengths.lens[b];
    for (int64_t h = 0; h < p.num_heads; ++h)
      for (int64_t t = 0; t < valid; ++t) {
        const Strides& s = p.log_decay_strides;
        const T* const x = static_cast<const T*>(p.log_decay) + b * s.batch + h * s.head + t * s.row;
        for (int64_t c = 0; c < channels; ++c) most = x[c] > most ? x[c] : most;  // NaN is never larger
      }
  }
  return most;
}
double largest_log_decay(const PreparedRecurrence& call) {
  return call.log_decay.scalar_type() == at::kDouble ? largest_log_decay<double>(call) : largest_log_decay<float>(call);
}

[[noreturn]] void refuse_positive(double most) {
  ATTNPACK_CHECK(false, "log_decay: got ", most,
                 ", want at most 0, the log of what is kept of the state: pass the log ",
                 "of a decay, such as -softplus(x)");
  std::abort();
}

// Computes out, and the states into `state`.
void compute(PreparedRecurrence& call, const Tensor& out, const Tensor& state) {
  LinearAttentionParams& p = call.params;
  if (call.lengths.has_padding() || p.head_dim == 0) out.zero_();
  if (p.num_heads == 0 || p.head_dim == 0 || p.v_head_dim == 0) return;
  p.out = out.mutable_data_ptr();
  p.out_strides = kernel_strides(out);
  p.state = state.mutable_data_ptr();
  p.shared_heads = shared_heads(p);
  const Kernels& kernels = kernels_in_use();
  const int64_t units = p.num_heads / p.shared_heads;  // of a sequence
  for_each_unit(p.sequences * units, call.work, kernels.linear_attention_scratch(p), [&](int64_t unit, void* scratch) {
    kernels.linear_attention(p, unit / units, unit % units * p.shared_heads, scratch);
  });
}

LinearAttentionResult linear_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const LinearAttentionArguments& args) {
  check_linear_attention(query, key, value, args);
  PreparedRecurrence call(query, key, value, args);
  const auto wide = query.options().dtype(accumulation_type(query));
  const Tensor out = empty_laid_as(query, linear_out_shape(query, value), query.options());
  const Tensor state = at::empty_symint(linear_state_shape(query, value, args), wide);
  compute(call, out, state);
  if (call.positive_decays) refuse_positive(largest_log_decay(call));
  return {out, state};
}

// The kernel may read and write one state: it reads columns of it before it writes them.
Tensor linear_attention_in_place_cpu(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                     const OwnedStateArguments& args) {
  check_linear_attention_in_place(query, key, value, state, args);
  PreparedRecurrence call(query, key, value, args.from(state));
  if (args.log_decay)  // before anything is written
    if (const double most = largest_log_decay(call); most > 0) refuse_positive(most);
  const Tensor out = empty_laid_as(query, linear_out_shape(query, value), query.options());
  compute(call, out, state);
  return out;
}

LinearAttentionGradients linear_attention_backward_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                       const Tensor& query, const Tensor& key, const Tensor& value,
                                                       const LinearAttentionArguments& args) {
  check_linear_attention_backward(grad_out, grad_state, query, key, value, args);
  PreparedRecurrence call(query, key, value, args);
  const LinearAttentionParams& p = call.params;
  const auto wide = query.options().dtype(accumulation_type(query));
  const bool zeros = call.lengths.has_padding() || p.head_dim == 0 || p.v_head_dim == 0;
  const auto of_type = [&](const std::optional<Tensor>& x, const at::TensorOptions& options) {
    return !x ? Tensor() : zeros ? at::zeros(x->sizes(), options) : at::empty(x->sizes(), options);
  };
  const auto gradient = [&](const std::optional<Tensor>& x) { return of_type(x, wide); };
  const auto of_keys = p.num_heads == p.num_key_heads ? query.options() : wide;  // else sums over value heads
  const Tensor q = of_type(query, of_keys), k = of_type(key, of_keys), v = of_type(value, query.options()),
               g = gradient(args.log_decay), b = gradient(args.beta), s = gradient(args.initial_state);
  if (p.head_dim > 0 && p.v_head_dim > 0) {
    const Tensor upstream = unit_last_stride(grad_out.to(query.scalar_type()));
    const Tensor last = grad_state ? grad_state->to(wide.dtype()).contiguous() : Tensor();
    const auto data = [](const Tensor& x) { return x.defined() ? x.mutable_data_ptr() : nullptr; };
    LinearAttentionBackwardParams bp{};
    bp.forward = p;
    bp.forward.positive_decays = nullptr;
    bp.grad_out = upstream.const_data_ptr();
    bp.grad_out_strides = kernel_strides(upstream);
    bp.grad_state = last.defined() ? last.const_data_ptr() : nullptr;
    bp.grad_query = data(q), bp.grad_key = data(k), bp.grad_value = data(v);
    bp.grad_log_decay = data(g), bp.grad_beta = data(b), bp.grad_initial_state = data(s);
    const Kernels& kernels = kernels_in_use();
    for_each_unit(p.sequences * p.num_key_heads, call.work, kernels.linear_attention_backward_scratch(bp),
                  [&](int64_t unit, void* scratch) {
                    kernels.linear_attention_backward(bp, unit / p.num_key_heads, unit % p.num_key_heads, scratch);
                  });
  }
  const auto rounded = [&](const Tensor& x, const std::optional<Tensor>& like) {
    return like ? x.to(like->scalar_type()) : at::empty({0}, query.options());
  };
  return {laid_as(query, rounded(q, query)), laid_as(key, rounded(k, key)), laid_as(value, rounded(v, value)),
          rounded(g, args.log_decay),        rounded(b, args.beta),         rounded(s, args.initial_state)};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("linear_attention", attnpack::from_schema<attnpack::linear_attention_cpu>);
  m.impl("linear_attention_", attnpack::from_schema<attnpack::linear_attention_in_place_cpu>);
  m.impl("linear_attention_backward", attnpack::from_schema<attnpack::linear_attention_backward_cpu>);
}
