#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <attnpack/ops/detail/formula_gradients.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/sequences.h>

namespace attnpack {
namespace {

// Tokens of a chunk. Per channel there are chunk * chunk * D decays, per head chunk * chunk.
constexpr int64_t kPerHead = 64, kPerChannel = 16;

// The decays between tokens, exp(sum of g over s < r <= t), 0 for s > t; g [..., C] gives [..., C, C]. Every sum is
// summed up by itself, because the difference of two sums loses digits, and is NaN where both are -inf.
Tensor spans_of(const Tensor& g) {
  const int64_t count = g.size(-1);
  const Tensor after = at::ones({count, count}, g.options().dtype(at::kBool)).tril(-1);
  const Tensor sums = at::where(after, g.unsqueeze(-1), 0.0).cumsum(-2);
  return sums.exp().tril();
}

// One chunk of all heads: q, k [B, Hv, C, D], v [B, Hv, C, Dv], g [B, Hv, C] or [B, Hv, C, D], beta [B, Hv, C].
// Advances the state, and returns the results.
Tensor advance(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, Tensor& state) {
  const bool per_channel = g.defined() && g.dim() == 4;
  // The decays [..., C, D or 1] from the chunk's start to each token, and from each token to its end.
  Tensor from_start, to_end, probs, overlaps;
  if (per_channel) {
    const Tensor spans = spans_of(g.transpose(-1, -2)).permute({0, 1, 3, 4, 2});  // [B, Hv, C, C, D]
    from_start = g.cumsum(-2).exp(), to_end = spans.select(-3, -1);
    const Tensor keys = k.unsqueeze(-3) * spans;
    probs = (q.unsqueeze(-2) * keys).sum(-1);
    if (beta.defined()) overlaps = (k.unsqueeze(-2) * keys).sum(-1).tril(-1);
  } else {
    const Tensor keys = k.transpose(-1, -2);
    probs = at::matmul(q, keys).tril();
    if (beta.defined()) overlaps = at::matmul(k, keys).tril(-1);
    if (g.defined()) {
      const Tensor spans = spans_of(g);
      from_start = g.cumsum(-1).exp().unsqueeze(-1), to_end = spans.select(-2, -1).unsqueeze(-1);
      probs = probs * spans;
      if (beta.defined()) overlaps = overlaps * spans;
    }
  }
  Tensor deltas = v;
  if (beta.defined()) {
    const Tensor predicted = at::matmul(g.defined() ? k * from_start : k, state), weights = beta.unsqueeze(-1);
    const Tensor one = at::eye(k.size(-2), k.options());
    deltas = at::linalg_solve_triangular(one + weights * overlaps, weights * (v - predicted), /*upper=*/false,
                                         /*left=*/true, /*unitriangular=*/true);
  }
  const Tensor out = at::matmul(g.defined() ? q * from_start : q, state) + at::matmul(probs, deltas);
  const Tensor written = at::matmul((g.defined() ? k * to_end : k).transpose(-1, -2), deltas);
  state = (g.defined() ? from_start.select(-2, -1).unsqueeze(-1) * state : state) + written;
  return out;
}

// Dense tensors of one length: all numbers of the accumulation type, heads as the values have them.
LinearAttentionResult in_chunks(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& log_decay,
                                const Tensor& beta, Tensor state) {
  const int64_t length = query.size(2), chunk = log_decay.defined() && log_decay.dim() == 4 ? kPerChannel : kPerHead;
  std::vector<Tensor> outs{value.narrow(2, 0, 0)};
  for (int64_t begin = 0; begin < length; begin += chunk) {
    const auto part = [&](const Tensor& x) {
      return x.defined() ? x.narrow(2, begin, std::min(chunk, length - begin)) : x;
    };
    outs.push_back(advance(part(query), part(key), part(value), part(log_decay), part(beta), state));
  }
  return {at::cat(outs, 2), state};
}

}  // namespace

LinearAttentionResult linear_attention_formula(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const LinearAttentionArguments& args) {
  check_linear_attention(query, key, value, args);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto wide = accumulation_type(query);
  const int64_t key_heads = query.size(1), group = key_heads ? value.size(1) / key_heads : 1, length = query.size(2);
  // Tokens after the valid ones become ones that change nothing: their decay is exp(0).
  const Tensor padding = args.kv_lens ? padding_of(*args.kv_lens, length).unsqueeze(1) : Tensor();  // [B, 1, L]
  const auto prepared = [&](const Tensor& x) {
    const Tensor numbers = x.to(wide);
    return padding.defined() ? numbers.masked_fill(x.dim() == 4 ? padding.unsqueeze(-1) : padding, 0) : numbers;
  };
  const auto per_head = [&](const Tensor& x) { return prepared(x).repeat_interleave(group, 1); };
  const auto optional = [&](const std::optional<Tensor>& x) { return x ? prepared(*x) : Tensor(); };
  const Tensor q = per_head(query) * linear_scale(query, args), k = per_head(key), v = prepared(value),
               g = optional(args.log_decay), beta = optional(args.beta);
  const Tensor state = args.initial_state
                           ? args.initial_state->to(wide)
                           : at::zeros_symint(linear_state_shape(query, value, args), query.options().dtype(wide));
  Tensor out, last = state;
  if (!args.cu_seqlens) {
    std::tie(out, last) = in_chunks(q, k, v, g, beta, state);
  } else {
    const std::vector<int64_t> ends = read_ends(*args.cu_seqlens, length, "query");
    std::vector<Tensor> outs{v.narrow(2, 0, 0)}, states{state.narrow(0, 0, 0)};
    for (size_t n = 0; n + 1 < ends.size(); ++n) {
      const auto part = [&](const Tensor& x) { return x.defined() ? x.narrow(2, ends[n], ends[n + 1] - ends[n]) : x; };
      const auto [o, s] =
          in_chunks(part(q), part(k), part(v), part(g), part(beta), state.narrow(0, static_cast<int64_t>(n), 1));
      outs.push_back(o);
      states.push_back(s);
    }
    out = at::cat(outs, 2), last = at::cat(states, 0);
  }
  return {laid_as(query, out.to(query.scalar_type())), last.is_same(state) ? state.clone() : last.contiguous()};
}

LinearAttentionGradients linear_attention_backward_formula(const Tensor& grad_out,
                                                           const std::optional<Tensor>& grad_state, const Tensor& query,
                                                           const Tensor& key, const Tensor& value,
                                                           const LinearAttentionArguments& args) {
  check_linear_attention_backward(grad_out, grad_state, query, key, value, args);
  std::vector<Tensor> inputs{query, key, value};
  for (const auto* given : {&args.log_decay, &args.beta, &args.initial_state})
    if (*given) inputs.push_back(**given);
  const auto formula = [&](const std::vector<Tensor>& sources) {
    LinearAttentionArguments from = args;
    size_t i = 3;
    for (auto* given : {&from.log_decay, &from.beta, &from.initial_state})
      if (*given) *given = sources[i++];
    return linear_attention_formula(sources[0], sources[1], sources[2], from);
  };
  const std::vector<Tensor> found = gradients_of_formula(formula, inputs, grad_out, grad_state);
  size_t i = 3;
  const auto next = [&](const std::optional<Tensor>& given) {
    return given ? found[i++].contiguous() : at::empty({0}, query.options());
  };
  const Tensor g = next(args.log_decay), beta = next(args.beta), state = next(args.initial_state);
  return {laid_as(query, found[0]), laid_as(key, found[1]), laid_as(value, found[2]), g, beta, state};
}

}  // namespace attnpack
