#include <attnpack/layers/recurrent.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/rms_norm.h>

#include <cmath>

namespace attnpack {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Result = std::tuple<Tensor, Tensor, Tensor>;

constexpr double kUnitEps = 1e-6;       // of the length of q and k, as in flash-linear-attention
constexpr double kDecayDivisor = 16.0;  // of a learned decay (Yang et al. 2024, section 4.4)

struct StateArguments {
  OptionalTensor conv_state = {}, state = {}, kv_lens = {}, cu_seqlens = {};
  OptionalTensor owned_state = {};  // in the place of state: it is written, and the state that is returned is empty

  auto members() const { return std::tie(conv_state, state, kv_lens, cu_seqlens, owned_state); }
};
#define ATTNPACK_STATE_SCHEMA                                                                    \
  "Tensor? conv_state=None, Tensor? state=None, Tensor? kv_lens=None, Tensor? cu_seqlens=None, " \
  "Tensor(a!)? owned_state=None"

StateArguments arguments_of(const RecurrentInputs& inputs) {
  const bool owned = inputs.in_place() && inputs.state();
  return {inputs.conv_state(), owned ? OptionalTensor() : inputs.state(), inputs.kv_lens(), inputs.cu_seqlens(),
          owned ? inputs.state() : OptionalTensor()};
}

// The state after a call: the given one where it was written.
Tensor state_after(const RecurrentInputs& inputs, const Tensor& returned) {
  return inputs.in_place() && inputs.state() ? *inputs.state() : returned;
}

LinearAttentionResult recur(const Tensor& query, const Tensor& key, const Tensor& value,
                            const OptionalTensor& log_decay, const OptionalTensor& beta, std::optional<double> scale,
                            const StateArguments& args) {
  if (!args.owned_state)
    return linear_attention_op(query, key, value, {log_decay, beta, args.state, args.kv_lens, args.cu_seqlens, scale});
  ATTNPACK_CHECK(!args.state, "owned_state: got one beside state, whose place it takes; leave one of them out");
  const Tensor out = linear_attention_in_place_op(query, key, value, *args.owned_state,
                                                  {log_decay, beta, args.kv_lens, args.cu_seqlens, scale});
  return {out, at::empty({0}, args.owned_state->options())};
}

// [B, L, heads * W] -> [B, L, heads, W]
Tensor heads_of(const char* name, const Tensor& x, int64_t heads) {
  ATTNPACK_CHECK(x.dim() == 3 && heads > 0 && x.sym_size(2) % heads == 0, name, ": got ", x.sym_sizes(),
                 ", want [B, L, heads * width] for ", heads, " heads");
  return x.unflatten_symint(2, {c10::SymInt(heads), x.sym_size(2) / heads});
}

// x / sqrt(sum(x^2) + eps) over the last dim, by the norm over its mean.
Tensor of_length_one(const Tensor& x) {
  const int64_t dim = x.size(-1);
  const double size = static_cast<double>(dim);
  return rms_norm(x, at::full({dim}, 1 / std::sqrt(size), x.options()), kUnitEps / size);
}

Tensor taps_of(const char* name, const Tensor& weight) {
  ATTNPACK_CHECK(weight.dim() == 3 && weight.sym_size(1) == 1, name, ": got ", weight.sym_sizes(),
                 ", want [C, 1, K], that of a Conv1d with a group for each channel");
  return weight.squeeze(1);
}

Tensor activated(const std::string_view& activation, const Tensor& x) {
  ATTNPACK_CHECK(activation == "silu" || activation == "sigmoid", "gate_activation: got '", activation,
                 "', want 'silu' or 'sigmoid'");
  return activation == "silu" ? at::silu(x) : at::sigmoid(x);
}

Result delta_attend_composite(const Tensor& mixed, const Tensor& decay, const Tensor& beta, const Tensor& gate,
                              const Tensor& conv_weight, const Tensor& a_log, const Tensor& dt_bias,
                              const Tensor& norm_weight, int64_t num_k_heads, double eps,
                              std::string_view gate_activation, double beta_scale, const StateArguments& args) {
  ATTNPACK_CHECK(beta.dim() == 3 && gate.dim() == 3 && mixed.dim() == 3, "mixed, beta, gate: got ", mixed.sym_sizes(),
                 ", ", beta.sym_sizes(), " and ", gate.sym_sizes(), ", want [B, L, width] each");
  const auto wide = accumulation_type(mixed);
  const int64_t heads = beta.size(2), values = gate.size(2), keys = (mixed.size(2) - values) / 2;
  ATTNPACK_CHECK(keys >= 0 && mixed.size(2) == 2 * keys + values, "mixed: got ", mixed.sym_sizes(),
                 ", want q, k and v side by side, v as wide as the gate ", gate.sym_sizes());
  const auto [convolved, conv_state] =
      causal_conv1d_op(mixed, taps_of("conv_weight", conv_weight),
                       {std::nullopt, args.conv_state, args.kv_lens, args.cu_seqlens, /*silu=*/true});
  const Tensor pair = of_length_one(heads_of("mixed", convolved.narrow(-1, 0, 2 * keys), 2 * num_k_heads)),
               q = pair.narrow(2, 0, num_k_heads), k = pair.narrow(2, num_k_heads, num_k_heads),
               v = heads_of("gate", convolved.narrow(-1, 2 * keys, values), heads);
  const bool per_channel = decay.size(-1) != heads;
  Tensor rate = a_log.to(wide).exp().reshape({heads}), step = at::softplus(decay.to(wide) + dt_bias.to(wide));
  if (per_channel) rate = rate.unsqueeze(-1), step = heads_of("decay", step, heads);
  const Tensor log_decay = (-rate * step).transpose(1, 2);  // [B, Hv, L] or [B, Hv, L, D]
  Tensor written = beta.to(wide).sigmoid();
  if (beta_scale != 1) written = written * beta_scale;
  const auto [out, state] = recur(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), log_decay,
                                  written.transpose(1, 2), std::nullopt, args);
  const Tensor normed = rms_norm(out.transpose(1, 2), norm_weight, eps);
  const Tensor factor = activated(gate_activation, heads_of("gate", gate, heads).to(wide));
  return {(normed * factor).to(mixed.scalar_type()).flatten(2), conv_state, state};
}

Result state_space_attend_composite(const Tensor& mixed, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                                    const Tensor& a_log, const Tensor& dt_bias, const Tensor& skip,
                                    const Tensor& norm_weight, int64_t num_groups, double eps,
                                    const StateArguments& args) {
  const int64_t heads = a_log.numel(), values = norm_weight.numel(), channels = conv_weight.size(0),
                keys = (channels - values) / 2;
  ATTNPACK_CHECK(keys > 0 && channels == values + 2 * keys, "conv_weight: got ", conv_weight.sym_sizes(),
                 ", want [C, 1, K] for C channels of values, ", values,
                 " by norm_weight, keys and queries side by side");
  ATTNPACK_CHECK(mixed.dim() == 3 && mixed.sym_size(2) == values + channels + heads, "mixed: got ", mixed.sym_sizes(),
                 ", want [B, L, ", values + channels + heads, "]: gate, values, keys, queries and dt side by side");
  ATTNPACK_CHECK(num_groups > 0 && heads % num_groups == 0, "num_groups: got ", num_groups,
                 ", which does not divide the ", heads, " heads of a_log");
  const auto wide = accumulation_type(mixed);
  const auto [convolved, conv_state] =
      causal_conv1d_op(mixed.narrow(-1, values, channels), taps_of("conv_weight", conv_weight),
                       {conv_bias, args.conv_state, args.kv_lens, args.cu_seqlens, /*silu=*/true});
  // Wide: the values that enter the operator are products.
  const Tensor parts = convolved.to(wide), x = heads_of("norm_weight", parts.narrow(-1, 0, values), heads),
               k = heads_of("conv_weight", parts.narrow(-1, values, keys), num_groups),
               q = heads_of("conv_weight", parts.narrow(-1, values + keys, keys), num_groups);
  const Tensor dt = at::softplus(mixed.narrow(-1, values + channels, heads).to(wide) + dt_bias.to(wide));
  const Tensor log_decay = -a_log.to(wide).exp() * dt;
  const auto [out, state] = recur(q.transpose(1, 2), k.transpose(1, 2), (x * dt.unsqueeze(-1)).transpose(1, 2),
                                  log_decay.transpose(1, 2), std::nullopt, /*scale=*/1.0, args);
  const Tensor sum = (out.transpose(1, 2) + skip.to(wide).unsqueeze(-1) * x).flatten(2);
  const Tensor gated = heads_of("norm_weight", sum * at::silu(mixed.narrow(-1, 0, values).to(wide)), num_groups);
  const Tensor ones = at::ones({values / num_groups}, gated.options());
  const Tensor normed = rms_norm(gated, ones, eps).flatten(2) * norm_weight.to(wide);
  return {normed.to(mixed.scalar_type()), conv_state, state};
}

std::tuple<Tensor, Tensor> linear_attend_composite(const Tensor& query, const Tensor& key, const Tensor& value,
                                                   const OptionalTensor& decay_logits, int64_t num_heads,
                                                   std::string_view feature_map, std::string_view decay,
                                                   std::optional<double> scale, const OptionalTensor& first_state,
                                                   const OptionalTensor& kv_lens, const OptionalTensor& cu_seqlens,
                                                   const OptionalTensor& owned_state) {
  check_linear_attend(feature_map, decay);
  ATTNPACK_CHECK(decay_logits.has_value() == (decay == "learned"),
                 "decay_logits: they go with decay 'learned', and only with it; got decay '", decay, "'");
  const auto wide = accumulation_type(query);
  const bool mapped = feature_map == "elu";
  const auto heads = [&](const char* name, const Tensor& x) { return heads_of(name, x, num_heads).transpose(1, 2); };
  Tensor q = heads("query", query), k = heads("key", key), v = heads("value", value);
  if (mapped) {
    q = at::elu(q) + 1, k = at::elu(k) + 1;
    v = at::cat({v, at::ones_like(v.narrow(-1, 0, 1))}, -1);
  }
  OptionalTensor log_decay;
  if (decay == "learned") log_decay = at::log_sigmoid(heads("decay_logits", *decay_logits).to(wide)) / kDecayDivisor;
  if (decay == "fixed") {
    const Tensor head = at::arange(num_heads, query.options().dtype(wide));
    log_decay = at::log1p(-at::exp2(-5 - head))
                    .view({1, -1, 1})
                    .expand_symint({q.sym_size(0), c10::SymInt(num_heads), q.sym_size(2)});
  }
  const auto [out, state] = recur(q, k, v, log_decay, std::nullopt, mapped && !scale ? std::make_optional(1.0) : scale,
                                  {std::nullopt, first_state, kv_lens, cu_seqlens, owned_state});
  if (!mapped) return {out.transpose(1, 2).flatten(2), state};
  const int64_t dim = v.size(-1) - 1;
  // Tokens that are padding have no weights.
  const Tensor sums = out.narrow(-1, dim, 1), divided = out.narrow(-1, 0, dim) / at::where(sums == 0, 1.0, sums);
  return {divided.to(query.scalar_type()).transpose(1, 2).flatten(2), state};
}

std::tuple<Tensor, Tensor> gated_convolution_composite(const Tensor& mixed, const Tensor& weight,
                                                       const OptionalTensor& bias, const OptionalTensor& conv_state,
                                                       const OptionalTensor& kv_lens,
                                                       const OptionalTensor& cu_seqlens) {
  ATTNPACK_CHECK(mixed.dim() == 3 && mixed.sym_size(2) % 3 == 0, "mixed: got ", mixed.sym_sizes(),
                 ", want [B, L, 3 * E]");
  const auto parts = mixed.chunk(3, -1);
  const auto [out, state] = causal_conv1d_op(parts[0] * parts[2], taps_of("weight", weight),
                                             {bias, conv_state, kv_lens, cu_seqlens, /*silu=*/false});
  return {parts[1] * out, state};
}

}  // namespace

void check_linear_attend(std::string_view feature_map, std::string_view decay) {
  ATTNPACK_CHECK(feature_map == "identity" || feature_map == "elu", "feature_map: got '", feature_map,
                 "', want 'identity' or 'elu'");
  ATTNPACK_CHECK(decay == "none" || decay == "fixed" || decay == "learned", "decay: got '", decay,
                 "', want 'none', 'fixed' or 'learned'");
}

std::tuple<Tensor, Tensor, Tensor> delta_attend(const Tensor& mixed, const Tensor& decay, const Tensor& beta,
                                                const Tensor& gate, const DeltaWeights& w, const DeltaSettings& s,
                                                const RecurrentInputs& inputs) {
  static const DispatchedOp<decltype(delta_attend_composite)> op("attnpack::delta_attend");
  auto result = op(mixed, decay, beta, gate, w.conv, w.a_log, w.dt_bias, w.norm, s.num_k_heads, s.eps,
                   s.gate_activation, s.beta_scale, arguments_of(inputs));
  std::get<2>(result) = state_after(inputs, std::get<2>(result));
  return result;
}

std::tuple<Tensor, Tensor, Tensor> state_space_attend(const Tensor& mixed, const StateSpaceWeights& w,
                                                      const StateSpaceSettings& s, const RecurrentInputs& inputs) {
  static const DispatchedOp<decltype(state_space_attend_composite)> op("attnpack::state_space_attend");
  auto result =
      op(mixed, w.conv, w.conv_bias, w.a_log, w.dt_bias, w.skip, w.norm, s.num_groups, s.eps, arguments_of(inputs));
  std::get<2>(result) = state_after(inputs, std::get<2>(result));
  return result;
}

std::tuple<Tensor, Tensor> linear_attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const std::optional<Tensor>& decay_logits, const LinearAttendSettings& s,
                                         const RecurrentInputs& inputs) {
  static const DispatchedOp<decltype(linear_attend_composite)> op("attnpack::linear_attend");
  const auto args = arguments_of(inputs);
  auto result = op(query, key, value, decay_logits, s.num_heads, s.feature_map, s.decay, s.scale, args.state,
                   args.kv_lens, args.cu_seqlens, args.owned_state);
  std::get<1>(result) = state_after(inputs, std::get<1>(result));
  return result;
}

std::tuple<Tensor, Tensor> gated_convolution(const Tensor& mixed, const Tensor& weight,
                                             const std::optional<Tensor>& bias, const RecurrentInputs& inputs) {
  static const DispatchedOp<decltype(gated_convolution_composite)> op("attnpack::gated_convolution");
  return op(mixed, weight, bias, inputs.conv_state(), inputs.kv_lens(), inputs.cu_seqlens());
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack;
  m.def(
      "delta_attend(Tensor mixed, Tensor decay, Tensor beta, Tensor gate, Tensor conv_weight, Tensor a_log, Tensor "
      "dt_bias, Tensor norm_weight, int num_k_heads, float eps, str gate_activation, float "
      "beta_scale=1.0, " ATTNPACK_STATE_SCHEMA ") -> (Tensor, Tensor, Tensor)",
      from_schema<delta_attend_composite>);
  m.def(
      "state_space_attend(Tensor mixed, Tensor conv_weight, Tensor? conv_bias, Tensor a_log, Tensor dt_bias, Tensor "
      "skip, Tensor norm_weight, int num_groups, float eps, " ATTNPACK_STATE_SCHEMA ") -> (Tensor, Tensor, Tensor)",
      from_schema<state_space_attend_composite>);
  m.def(
      "linear_attend(Tensor query, Tensor key, Tensor value, Tensor? decay_logits, int num_heads, str feature_map, str "
      "decay, float? scale=None, Tensor? state=None, Tensor? kv_lens=None, Tensor? cu_seqlens=None, Tensor(a!)? "
      "owned_state=None) -> (Tensor, Tensor)",
      from_schema<linear_attend_composite>);
  m.def(
      "gated_convolution(Tensor mixed, Tensor weight, Tensor? bias=None, Tensor? conv_state=None, Tensor? "
      "kv_lens=None, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor)",
      from_schema<gated_convolution_composite>);
}
