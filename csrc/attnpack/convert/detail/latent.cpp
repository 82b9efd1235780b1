#include <attnpack/convert/detail/latent.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/convert/detail/align.h>
#include <attnpack/convert/detail/calibration.h>
#include <attnpack/convert/detail/rope_pair.h>
#include <attnpack/convert/pool.h>
#include <attnpack/core/check.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <numeric>

namespace attnpack::convert {

namespace {

// The mean of e^(i theta distance) over pairs of a query and a key in a text of that length.
c10::complex<double> mean_rotation(double theta, int64_t length, bool causal) {
  const auto distance = at::arange(length, at::kDouble);
  const auto weight = static_cast<double>(length) - distance;  // how many pairs are that far apart
  if (!causal) weight.slice(0, 1).mul_(2);                     // keys on both sides
  const auto mean = [&](const at::Tensor& values) { return ((values * weight).sum() / weight.sum()).item<double>(); };
  return {mean((distance * theta).cos()), causal ? mean((distance * theta).sin()) : 0.0};
}

// The mean square of the heads' outputs, as the metric [n, d, d] counts it.
double mean_square_output(const at::Tensor& metric, const at::Tensor& heads, const at::Tensor& moment) {
  return at::matmul(metric, output_moment(heads, moment)).diagonal(0, 1, 2).sum().item<double>();
}

// Scales the metric so that it counts errors in heads relative to their outputs. The metric becomes 0 for heads
// that are a rounding error of `whole`.
at::Tensor relative_metric(const at::Tensor& metric, const at::Tensor& heads, const at::Tensor& whole,
                           const at::Tensor& moment) {
  const auto found = mean_square_output(metric, heads, moment);
  return found > 1e-12 * mean_square_output(metric, whole, moment) ? metric / found : at::zeros_like(metric);
}

struct ByHead {
  at::Tensor q, k, v;  // [H, D, E], [Hkv, D, E], [Hkv, Dv, E], fp64, biases as a last column
  at::Tensor o;        // [H, E, Dv]
  at::Tensor q_moment, kv_moment;
};

ByHead by_head(const AttentionWeights& weights, const LatentOptions& o) {
  const auto inputs = resolve_calibration(o.calibration());
  const bool kv_bias = weights.k_bias.defined() || weights.v_bias.defined();
  const auto biased = [&](const at::Tensor& weight, const at::Tensor& bias) {
    return with_bias(weight, bias.defined() || !kv_bias ? bias : at::zeros_like(weight.select(1, 0)));
  };
  ByHead result;
  result.q = with_bias(weights.q, weights.q_bias).unflatten(0, {o.num_heads(), -1});
  result.k = biased(weights.k, weights.k_bias).unflatten(0, {o.num_kv_heads(), -1}).clone();
  result.v = biased(weights.v, weights.v_bias).unflatten(0, {o.num_kv_heads(), -1});
  result.o = weights.o.to(at::kDouble).unflatten(1, {o.num_heads(), -1}).transpose(0, 1);
  result.q_moment = second_moment(inputs.x, result.q.size(2), weights.q_bias.defined(), result.q);
  result.kv_moment = second_moment(inputs.context, result.k.size(2), kv_bias, result.k);
  return result;
}

std::vector<int64_t> pairs_of(const LatentOptions& o) {
  return o.pairs().empty() ? std::vector<int64_t>(o.inv_freq().size(), 1) : o.pairs();
}

int64_t count_pairs(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t(0));
}

at::Tensor as_index(const std::vector<int64_t>& map, const at::Tensor& like) {
  return at::tensor(map, at::kLong).to(like.device());
}

// The mean square of the pair's queries by the kv head that they read, [Hkv, 1, 1].
at::Tensor query_squares(const ByHead& heads, const at::Tensor& queries,  // [H, 1, E], complex
                         const std::vector<int64_t>& map) {
  const auto none = at::zeros({heads.k.size(0), 1, 1}, queries.options());
  return none.index_add(0, as_index(map, queries), output_moment(queries, heads.q_moment));
}

// The leading `count` components of a frequency's pairs. All of them are the pairs themselves, bit for bit.
SharedRows shared_pairs(const ByHead& heads, const at::Tensor& keys,  // [Hkv, 1, E]
                        const at::Tensor& queries, const std::vector<int64_t>& map, int64_t count) {
  if (count == keys.size(0)) {
    const auto each = at::eye(count, keys.options());
    return {keys.squeeze(1), each.unsqueeze(1), each};
  }
  const auto metric = query_squares(heads, queries, map);
  return count == 1 ? share_heads(keys, metric, heads.kv_moment) : leading_rows(keys, metric, heads.kv_moment, count);
}

// Subtracts the shared rotating pairs from every kv head. Returns the queries for those pairs, and the queries for the
// rest.
struct Rotated {
  at::Tensor keys;     // [R, E]
  at::Tensor queries;  // [H, R, E]
  at::Tensor still;    // [H, D, E], queries for keys in which nothing rotates
};

Rotated share_rotation(ByHead& heads, const std::vector<int64_t>& map, const LatentOptions& o) {
  const auto pairs = pairs_of(o);
  const auto pairs_dim = 2 * static_cast<int64_t>(pairs.size()), rope_dim = 2 * count_pairs(pairs),
             num_heads = heads.q.size(0);
  Rotated result{at::empty({rope_dim, heads.k.size(2)}, heads.k.options()),
                 at::empty({num_heads, rope_dim, heads.q.size(2)}, heads.q.options()), heads.q.clone()};
  const auto reads = as_index(map, heads.k);
  for (int64_t p = 0, made = 0; p < pairs_dim / 2; ++p) {
    const RopePair pair(p, pairs_dim, o.interleaved());
    const auto keys = pair.get(heads.k), queries = pair.get(heads.q);
    const auto rotation = mean_rotation(o.inv_freq()[p], o.length(), o.causal());
    pair.set(result.still, queries * (rotation * o.rope_factor() * o.rope_factor()));
    if (pairs[p] == 0) continue;
    const auto shared = shared_pairs(heads, keys, queries, map, pairs[p]);
    pair.set(heads.k, keys - at::matmul(shared.maps, shared.rows).reshape_as(keys));
    const auto factors = shared.maps.index_select(0, reads);  // [H, 1, count]
    for (int64_t c = 0; c < pairs[p]; ++c, ++made) {
      const RopePair target(made, rope_dim, o.interleaved());
      target.set(result.keys, shared.rows.narrow(0, c, 1));
      // Re(q conj(a k)) = Re((conj(a) q) conj(k))
      target.set(result.queries, queries * factors.narrow(2, c, 1).conj());
    }
  }
  return result;
}

// Splits rows into [..., E] and, with bias, the last column, which holds the bias.
std::pair<at::Tensor, at::Tensor> split_bias(const at::Tensor& rows, bool bias, at::ScalarType dtype) {
  const auto typed = rows.to(dtype);
  if (!bias) return {typed.contiguous(), at::Tensor()};
  return {typed.narrow(1, 0, typed.size(1) - 1).contiguous(), typed.select(1, -1).contiguous()};
}

void check_latent(const AttentionWeights& weights, const LatentOptions& o) {
  check_layer(weights, MergeOptions(o.num_heads(), o.num_kv_heads(), o.num_kv_heads())
                           .rope_dim(2 * static_cast<int64_t>(o.inv_freq().size())));
  ATTNPACK_CHECK(o.kv_lora_rank() >= 1, "kv_lora_rank: got ", o.kv_lora_rank(), ", want at least 1");
  ATTNPACK_CHECK(o.length() >= 1, "length: got ", o.length(), ", want at least 1");
  ATTNPACK_CHECK(weights.k.size(1) == weights.v.size(1), "v: got width ", weights.v.size(1), ", want that of k, ",
                 weights.k.size(1), ": one latent makes both");
  ATTNPACK_CHECK(weights.v.size(0) == weights.k.size(0), "v: got shape ", weights.v.sizes(), ", want that of k, ",
                 weights.k.sizes());
  check_numbers("q", weights.q), check_numbers("k", weights.k);
  check_numbers("v", weights.v), check_numbers("o", weights.o);
  ATTNPACK_CHECK(o.pairs().empty() || o.pairs().size() == o.inv_freq().size(), "pairs: got ", o.pairs().size(),
                 ", want one number for each of ", o.inv_freq().size(), " frequencies");
  for (const auto count : o.pairs())
    ATTNPACK_CHECK(count >= 0 && count <= o.num_kv_heads(), "pairs: got ", count, ", want 0 to num_kv_heads ",
                   o.num_kv_heads());
}

}  // namespace

LatentWeights factorise_latent(const AttentionWeights& weights, const LatentOptions& o) {
  const at::NoGradGuard no_grad;
  check_latent(weights, o);
  const auto map = kv_head_of_queries(o.num_heads(), o.num_kv_heads(), o.head_map());
  auto heads = by_head(weights, o);
  const auto keys = heads.k.clone();
  const auto rotated = share_rotation(heads, map, o);

  auto key_metric = at::zeros({heads.k.size(0), heads.k.size(1), heads.k.size(1)}, heads.k.options());
  auto value_metric = at::zeros_like(key_metric);
  for (int64_t h = 0; h < o.num_heads(); ++h) {
    key_metric[map[h]] += output_moment(rotated.still[h], heads.q_moment);
    value_metric[map[h]] += at::matmul(heads.o[h].t(), heads.o[h]);
  }
  const auto stacked = at::cat({heads.k, heads.v});  // [2 Hkv, D, E]
  const auto full = stacked.size(0) * stacked.size(1), rank = std::min(o.kv_lora_rank(), full);
  const auto metric = at::cat({relative_metric(key_metric, heads.k, keys, heads.kv_moment),
                               relative_metric(value_metric, heads.v, heads.v, heads.kv_moment)});
  const auto lead = leading_rows(stacked, metric, heads.kv_moment, rank);
  const auto rows = at::constant_pad_nd(lead.rows, {0, 0, 0, o.kv_lora_rank() - rank});  // [C, E]
  const auto maps = at::constant_pad_nd(lead.maps, {0, o.kv_lora_rank() - rank});        // [2 Hkv, D, C]

  const auto reads = as_index(map, maps);
  const auto kv_b = at::cat({maps.narrow(0, 0, o.num_kv_heads()).index_select(0, reads),
                             maps.narrow(0, o.num_kv_heads(), o.num_kv_heads()).index_select(0, reads)},
                            1);
  const auto dtype = weights.k.scalar_type();
  LatentWeights result;
  std::tie(result.q, result.q_bias) =
      split_bias(at::cat({rotated.still, rotated.queries}, 1).flatten(0, 1), weights.q_bias.defined(), dtype);
  std::tie(result.kv_a, result.kv_a_bias) =
      split_bias(at::cat({rows, rotated.keys}), weights.k_bias.defined() || weights.v_bias.defined(), dtype);
  result.kv_b = kv_b.flatten(0, 1).to(dtype).contiguous();
  return result;
}

at::Tensor rotation_losses(const AttentionWeights& weights, const LatentOptions& o) {
  const at::NoGradGuard no_grad;
  check_latent(weights, o);
  const auto map = kv_head_of_queries(o.num_heads(), o.num_kv_heads(), o.head_map());
  const auto heads = by_head(weights, o);
  const auto frequencies = static_cast<int64_t>(o.inv_freq().size());
  auto squares = at::empty({frequencies, o.num_kv_heads()}, heads.k.options());
  auto kept = at::empty({frequencies, 1}, heads.k.options());
  for (int64_t p = 0; p < frequencies; ++p) {
    const RopePair pair(p, 2 * frequencies, o.interleaved());
    const auto weighted = (query_squares(heads, pair.get(heads.q), map).sqrt() * pair.get(heads.k)).squeeze(1);
    squares[p].copy_(at::linalg_eigvalsh(output_moment(weighted, heads.kv_moment)).flip(0));
    kept[p].fill_(std::norm(std::complex<double>(mean_rotation(o.inv_freq()[p], o.length(), o.causal()))));
  }
  const auto whole = squares.sum();
  return squares.clamp_min(0) * (1 - kept) / at::where(whole > 0, whole, at::ones_like(whole));
}

std::vector<int64_t> choose_pairs(const at::Tensor& losses, int64_t rope_dim) {
  ATTNPACK_CHECK(rope_dim >= 2 && rope_dim % 2 == 0 && rope_dim / 2 <= losses.numel(), "rope_dim: got ", rope_dim,
                 ", want an even number from 2 to ", 2 * losses.numel(), ", the dims that rotate in all kv heads");
  const auto order = std::get<1>(losses.flatten().cpu().sort(/*stable=*/true, 0, /*descending=*/true));
  std::vector<int64_t> pairs(losses.size(0), 0);
  for (int64_t i = 0; i < rope_dim / 2; ++i) ++pairs[order[i].item<int64_t>() / losses.size(1)];
  return pairs;
}

}  // namespace attnpack::convert
