#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/extremes.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/row_pieces.h>
#include <attnpack/ops/detail/selected_columns.h>
#include <attnpack/ops/detail/unknown_sizes.h>
#include <attnpack/ops/softcap.h>

namespace attnpack {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A size as a number. Tensor::size would fix every size of a traced tensor, and so the graph to one length.
int64_t known_size(const Tensor& x, int64_t dim) { return x.sym_size(dim).guard_int(__FILE__, __LINE__); }

// [B, Hkv, L, D] -> [B, Hq, L, D], the kv head of every query head.
Tensor expand_heads(const Tensor& x, int64_t num_heads, const HeadMap& head_map) {
  if (head_map) {
    std::vector<Tensor> heads;
    for (int64_t kv_head : *head_map) heads.push_back(x.select(1, kv_head));
    return heads.empty() ? x.narrow(1, 0, 0) : at::stack(heads, 1);
  }
  if (x.sym_size(1) == num_heads) return x;
  return x.unsqueeze(2).expand_symint({-1, -1, num_heads / known_size(x, 1), -1, -1}).flatten(1, 2);
}

// [B, H, M, K] [B, H, K, N] -> [B, H, M, N]; torch's matmul reads plain sizes.
Tensor product(const Tensor& a, const Tensor& b) {
  return at::bmm(a.flatten(0, 1), b.flatten(0, 1))
      .view_symint({a.sym_size(0), a.sym_size(1), a.sym_size(2), b.sym_size(3)});
}

// The transpose of expand_heads: the sum of what the query heads of a kv head give it.
Tensor sum_heads(const Tensor& x, const c10::SymInt& num_kv_heads, const HeadMap& head_map) {
  const auto sizes = x.sym_sizes();
  if (head_map) {
    std::vector<Tensor> sums(num_kv_heads.guard_int(__FILE__, __LINE__), x.narrow(1, 0, 0).sum(1));
    for (size_t h = 0; h < head_map->size(); ++h) {
      Tensor& sum = sums[(*head_map)[h]];
      sum = sum + x.select(1, static_cast<int64_t>(h));
    }
    return sums.empty() ? x.narrow(1, 0, 0) : at::stack(sums, 1);
  }
  if (num_kv_heads == sizes[1]) return x;
  return x.unflatten_symint(1, {num_kv_heads, sizes[1] / num_kv_heads}).sum(2);
}

double score_factor(const Tensor& query, const AttentionArguments& args) {
  const int64_t head_dim = known_size(query, 3);
  return args.scale ? *args.scale : default_scale(head_dim);
}

// The factors of the probabilities under dropout, [B, Hq, Lq, Lkv]: the draw of core/dropout.h in signed numbers.
Tensor dropout_factors(const Tensor& probs, const AttentionArguments& args) {
  const auto sizes = probs.sym_sizes();
  const auto signed_number = [](uint64_t x) { return static_cast<int64_t>(x); };
  const auto shifted = [](const Tensor& x, int64_t bits) {
    return x.bitwise_right_shift(bits).bitwise_and((int64_t{1} << (64 - bits)) - 1);
  };
  const auto stir = [&](const Tensor& x, int64_t bits) { return x.bitwise_xor(shifted(x, bits)); };
  const Tensor place = at::arange(sizes[0] * sizes[1] * sizes[2] * sizes[3], probs.options().dtype(at::kLong));
  Tensor x = (place.view_symint(sizes) + 1) * signed_number(0x9e3779b97f4a7c15u);
  x = x + args.dropout_seed->to(probs.device()).view({1, 1, 1, 1});
  x = stir(x, 30) * signed_number(0xbf58476d1ce4e5b9u);
  x = stir(x, 27) * signed_number(0x94d049bb133111ebu);
  x = stir(x, 31);
  const Tensor kept = shifted(x, 11).to(at::kDouble) * 0x1p-53 >= args.dropout_p;
  return kept.to(probs.scalar_type()) / (1 - args.dropout_p);
}

// x with zeros where it is not finite: an excluded key must not come in as 0 * NaN.
Tensor finite_part(const Tensor& x) { return x.masked_fill(x.isfinite().logical_not(), 0); }

// Whether key_index names a key to a query, [B, 1 or Hq, Lq, Lkv].
Tensor selected_keys(const Tensor& query, const Tensor& key, const AttentionArguments& args) {
  const c10::SymInt kv_len = key.sym_size(2), blocks = count_blocks(kv_len, args.key_block);
  if (args.key_index->is_cpu() && !at::isTensorSubclassLike(*args.key_index))
    check_key_index_values(*args.key_index, args.key_block, known_size(key, 2));
  const Tensor index = args.key_index->to(at::kLong);
  // One more block stands for none.
  const Tensor place = at::where((index < 0) | (index >= blocks), at::full_symint({}, blocks, index.options()), index);
  const auto sizes = index.sym_sizes();
  Tensor selected = at::zeros_symint({sizes[0], sizes[1], sizes[2], blocks + 1}, index.options().dtype(at::kBool));
  selected = selected.scatter(-1, place, true).narrow_symint(-1, 0, blocks);
  if (args.key_block > 1)
    selected = selected.index_select(-1, at::arange(kv_len, index.options()).floor_divide(args.key_block));
  return known_size(selected, 1) == 1 ? selected : expand_heads(selected, known_size(query, 1), args.head_map);
}

Tensor masked_scores(const Tensor& query, const Tensor& key, const AttentionArguments& args, c10::string_view stage) {
  const auto accumulation = accumulation_type(query.scalar_type());
  const Tensor keys = expand_heads(key, known_size(query, 1), args.head_map).to(accumulation);
  const Tensor queries = query.to(accumulation);
  Tensor scores = product(finite_part(queries), finite_part(keys).transpose(-2, -1)) * score_factor(query, args);
  scores = scores.masked_fill(keys.isfinite().all(-1).logical_not().unsqueeze(-2), std::nan(""));
  scores = scores.masked_fill(queries.isfinite().all(-1).logical_not().unsqueeze(-1), std::nan(""));
  if (stage == "scaled") return scores;
  scores = softcapped(scores, usable_softcap(args.softcap, accumulation));
  if (stage == "capped") return scores;
  const Tensor position = row_positions(query, args);
  const Tensor column = at::arange(key.sym_size(2), at::TensorOptions(at::kLong).device(query.device()));
  const auto allowed = allowed_by_range(position, column, args);
  if (args.alibi_slopes) {
    const Tensor distance = (position - column).abs().to(accumulation);
    scores = scores - args.alibi_slopes->detach().to(accumulation).view({-1, 1, 1}) * distance;
  }
  if (args.mask && args.mask->scalar_type() == at::kBool) {
    scores = scores.masked_fill(args.mask->logical_not(), -kInfinity);
  } else if (args.mask) {
    const Tensor added = args.mask->to(accumulation);
    scores = (scores + added).masked_fill(added == -kInfinity, -kInfinity);
  }
  if (args.key_index) scores = scores.masked_fill(selected_keys(query, key, args).logical_not(), -kInfinity);
  return allowed ? scores.masked_fill(allowed->logical_not(), -kInfinity) : scores;
}

// Softmax over keys and the head's sink; rows without a key give 0, and -inf (or the sink) as lse.
std::tuple<Tensor, Tensor> softmax(const Tensor& scores, const std::optional<Tensor>& sinks) {
  Tensor all = scores;
  if (sinks) {
    const auto sizes = scores.sym_sizes();
    const Tensor sink = sinks->to(scores.scalar_type()).view({-1, 1, 1});
    all = at::cat({scores, sink.expand_symint({sizes[0], sizes[1], sizes[2], 1})}, -1);
  }
  if (is_below_one(all.sym_size(-1)))
    return {scores, at::full_symint(scores.sym_sizes().slice(0, 3), -kInfinity, scores.options())};
  const Tensor empty = (all == -kInfinity).all(-1);
  // As at::logsumexp, which asks whether there are rows: a size that depends on data does not say.
  Tensor top = all.detach().amax(-1, true);
  top = top.masked_fill(top.abs() == kInfinity, 0);
  const Tensor sum = (all - top).exp().sum(-1).masked_fill(empty, 1);
  const Tensor lse = (sum.log() + top.squeeze(-1)).masked_fill(empty, -kInfinity);
  const Tensor excluded = scores == -kInfinity;
  const Tensor shifted = scores.masked_fill(excluded, 0) - lse.masked_fill(empty, 0).unsqueeze(-1);
  return {shifted.exp().masked_fill(excluded, 0), lse};
}

// The probabilities at only the selected keys, [B, Hq, Lq, names * key_block].
Tensor selected_probabilities(const Tensor& query, const Tensor& key, const AttentionArguments& args) {
  const auto of_heads = [&](const Tensor& x) {
    return known_size(x, 1) == 1 ? x : expand_heads(x, known_size(query, 1), args.head_map);
  };
  const auto names = selected_columns(*args.key_index, args.key_block, key.sym_size(2));
  const Tensor keys = of_heads(names.keys), hidden = of_heads(names.counted).logical_not();
  return in_row_pieces(query, key.sym_size(2), [&](const Tensor& rows, int64_t first) {
    const auto of_rows = [&](const Tensor& x) { return narrow_rows(x, first, rows.sym_size(2)); };
    AttentionArguments here = args;
    if (args.mask) here.mask = of_rows(*args.mask);
    here.key_index = of_rows(*args.key_index);
    const auto moved = [&](const auto& offset) { return near_offset(offset, args.window[0], args.window[1]) + first; };
    if (args.q_offsets)
      here.q_offsets = moved(args.q_offsets->to(at::kLong));
    else
      here.q_offset = moved(args.q_offset);
    const Tensor probs = std::get<0>(softmax(masked_scores(rows, key, here, "masked"), args.sinks));
    return at_columns(probs, of_rows(keys)).masked_fill(of_rows(hidden), 0);
  });
}

}  // namespace

Tensor row_positions(const Tensor& query, const AttentionArguments& args) {
  const Tensor row = at::arange(query.sym_size(2), at::TensorOptions(at::kLong).device(query.device())).unsqueeze(-1);
  const auto near = [&](const auto& offset) { return near_offset(offset, args.window[0], args.window[1]); };
  return args.q_offsets ? row + near(args.q_offsets->to(at::kLong)).view({-1, 1, 1, 1}) : row + near(args.q_offset);
}

std::optional<Tensor> allowed_by_range(const Tensor& position, const Tensor& column, const AttentionArguments& args) {
  std::optional<Tensor> allowed;
  const auto keep = [&](const Tensor& condition) { allowed = allowed ? *allowed & condition : condition; };
  if (args.causal) keep(column <= position);
  if (args.window[0] >= 0) keep(position - column <= near_window(args.window[0]));
  if (args.window[1] >= 0) keep(column - position <= near_window(args.window[1]));
  if (args.chunk) keep(position.div(*args.chunk, "floor") == column.div(*args.chunk, "floor"));
  if (args.kv_lens) keep(column < args.kv_lens->to(at::kLong).view({-1, 1, 1, 1}));
  return allowed;
}

AttentionArguments with_chunks_masked(AttentionArguments args, const Tensor& position, const Tensor& column) {
  AttentionArguments chunks;
  chunks.chunk = std::exchange(args.chunk, std::nullopt);
  const Tensor same = *allowed_by_range(position, column, chunks);
  if (!args.mask)
    args.mask = same;
  else if (args.mask->scalar_type() == at::kBool)
    args.mask = args.mask->logical_and(same);
  else
    args.mask = args.mask->masked_fill(same.logical_not(), -kInfinity);
  return args;
}

Tensor softcapped(const Tensor& x, double softcap) { return softcap > 0 ? softcap * (x / softcap).tanh() : x; }

Tensor scores_formula(const Tensor& query, const Tensor& key, const AttentionArguments& args, c10::string_view stage) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_attention(query, key, key, args);
  if (args.kv_lens && args.kv_lens->is_cpu() && !at::isTensorSubclassLike(*args.kv_lens)) {
    const Tensor lengths = args.kv_lens->to(at::kLong).contiguous();
    check_kv_lens_values(lengths.const_data_ptr<int64_t>(), lengths.size(0), key.size(2));
  }
  ATTNPACK_CHECK(stage == "scaled" || stage == "capped" || stage == "masked" || stage == "probs" || stage == "named",
                 "stage is '", stage, "', wants 'scaled', 'capped', 'masked', 'probs' or 'named'");
  ATTNPACK_CHECK(stage != "named" || args.key_index, "stage is 'named' without key_index, wants the keys by their ",
                 "numbers: give key_index, or take 'probs'");
  if (stage == "named") return selected_probabilities(query, key, args);
  const Tensor scores = masked_scores(query, key, args, stage);
  return stage == "probs" ? std::get<0>(softmax(scores, args.sinks)) : scores;
}

AttentionResult attention_formula(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const AttentionArguments& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_attention(query, key, value, args);
  const Tensor scores = masked_scores(query, key, args, "masked");
  auto [probs, lse] = softmax(scores, args.sinks);
  const Tensor values = expand_heads(value, known_size(query, 1), args.head_map).to(scores.scalar_type());
  const Tensor broken = values.isfinite().logical_not().to(scores.scalar_type());
  if (args.dropout_p > 0) probs = probs * dropout_factors(probs, args);
  Tensor out = product(probs, finite_part(values));
  // A value that is not finite reaches exactly the rows that attend it.
  const Tensor touched = product((scores != -kInfinity).to(scores.scalar_type()), broken) > 0;
  out = out.masked_fill(touched, std::nan(""));
  return {laid_as(query, out.to(query.scalar_type())), lse};
}

// With P the probabilities, M the factors of dropout and S the scores after softcap:
//   dV = (P M)^T dO    dP = M (dO V^T)    delta = rowsum(P dP) - dlse    dS = P (dP - delta)    dsink = -P_sink delta
// dQ and dK follow from dS by the derivative of softcap, 1 - (S / c)^2, and by the scale.
AttentionGradients attention_backward_formula(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                              const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionArguments& args, bool mask_gradient, bool sinks_gradient) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_attention(query, key, value, args);
  const auto dtype = query.scalar_type(), accumulation = accumulation_type(dtype);
  const Tensor scores = masked_scores(query, key, args, "masked");
  const Tensor excluded = scores == -kInfinity;
  const auto [probs, lse] = softmax(scores, args.sinks);
  const auto expanded = [&](const Tensor& x) {
    return expand_heads(x, known_size(query, 1), args.head_map).to(accumulation);
  };
  const Tensor values = expanded(value), upstream = grad_out.to(accumulation);
  Tensor weights = probs, grad_probs = product(upstream, finite_part(values).transpose(-2, -1));
  grad_probs = grad_probs.masked_fill(values.isfinite().all(-1).logical_not().unsqueeze(-2), std::nan(""));
  if (args.dropout_p > 0) {
    const Tensor factors = dropout_factors(probs, args);
    weights = weights * factors;
    grad_probs = grad_probs * factors;
  }
  grad_probs = grad_probs.masked_fill(excluded, 0);
  Tensor delta = (probs * grad_probs).sum(-1);
  if (grad_lse) delta = delta - grad_lse->to(accumulation);
  const Tensor grad_masked = (probs * (grad_probs - delta.unsqueeze(-1))).masked_fill(excluded, 0);
  Tensor grad_scores = grad_masked;
  if (const double cap = usable_softcap(args.softcap, accumulation); cap > 0) {
    const Tensor share = masked_scores(query, key, args, "capped").masked_fill(excluded, 0) / cap;
    grad_scores = grad_scores * (1 - share * share);
  }
  grad_scores = grad_scores * score_factor(query, args);
  const Tensor grad_query = product(grad_scores, finite_part(expanded(key)));
  const Tensor grad_keys = product(grad_scores.transpose(-2, -1), finite_part(query.to(accumulation)));
  const Tensor grad_values = product(weights.transpose(-2, -1), upstream);
  const auto joined = [&](const Tensor& like, const Tensor& x) {
    return laid_as(like, sum_heads(x, key.sym_size(1), args.head_map).to(dtype));
  };
  Tensor grad_mask = at::empty({0}, query.options()), grad_sinks = grad_mask;
  if (mask_gradient) grad_mask = at::sum_to(grad_masked, args.mask->sym_sizes()).to(args.mask->scalar_type());
  if (sinks_gradient) {
    const Tensor sink = args.sinks->to(accumulation).view({-1, 1}), none = sink == -kInfinity;
    const Tensor share = (sink.masked_fill(none, 0) - lse.masked_fill(none, 0)).exp().masked_fill(none, 0);
    grad_sinks = (share * delta).neg().sum(at::IntArrayRef{0, 2}).to(args.sinks->scalar_type());
  }
  return {laid_as(query, grad_query.to(dtype)), joined(key, grad_keys), joined(value, grad_values), grad_mask,
          grad_sinks};
}

}  // namespace attnpack
