#include <attnpack/convert/detail/latent_layer.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>

#include <algorithm>
#include <cmath>

namespace attnpack::convert {

namespace {

// The numbers by which the norm of x, with a constant beside it, multiplies x by `gain` and does nothing else.
struct LinearNorm {
  double shrink;    // of x
  double constant;  // after the shrinking
  double weight;    // of the norm
  double gain;
};

// x has `width` - 1 numbers and a length of `bound` at most; dtype is that of the weights. The error of the norm is
// |x|^2 / (2 constant^2), relative to x.
LinearNorm linear_norm(int64_t width, double bound, at::ScalarType dtype) {
  const bool half = dtype == at::kHalf;                 // whose largest number is 65,504
  const double times = half ? 64 : 4096, most = 16384;  // errors below 2^-13 and 2^-25
  LinearNorm result{1.0, 0, 0, 0};
  if (bound <= 0) bound = 1;
  if (half)
    while (result.shrink * bound * times > most) result.shrink /= 2;
  const double root = std::sqrt(static_cast<double>(width));
  // A power of two, so that bf16 rounds x only once. At least 32, so that eps (1e-6) is nothing beside it.
  result.weight = std::max(32.0, std::exp2(std::ceil(std::log2(result.shrink * bound * times / root))));
  result.constant = at::scalar_tensor(result.weight * root, at::kDouble).to(dtype).item<double>();
  result.gain = result.shrink * result.weight * root / result.constant;
  return result;
}

// [width]: the norm's weight for x, and 0 for the constant, which is not used after it.
at::Tensor norm_weight(const LinearNorm& norm, int64_t width, const at::Tensor& like) {
  auto weight = at::full({width}, norm.weight, like.options());
  weight[width - 1].fill_(0);
  return weight;
}

// The largest length of what an RMSNorm of that weight gives.
double largest_input(const at::Tensor& input_norm) {
  return input_norm.abs().max().item<double>() * std::sqrt(static_cast<double>(input_norm.size(0)));
}

// The largest length of rows x + bias for such an x.
double largest_length(const at::Tensor& rows, const at::Tensor& bias, const at::Tensor& input_norm) {
  const auto seen = rows * input_norm;
  const auto squares = at::linalg_eigvalsh(seen.size(0) < seen.size(1) ? at::matmul(seen, seen.t())  // the smaller one
                                                                       : at::matmul(seen.t(), seen));
  const auto stretch = std::sqrt(std::max(0.0, squares.max().item<double>()));
  return stretch * std::sqrt(static_cast<double>(rows.size(1))) + bias.norm().item<double>();
}

AttentionWeights in_double(const AttentionWeights& w) {
  const auto wide = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(at::kDouble) : tensor; };
  return {wide(w.q), wide(w.k), wide(w.v), wide(w.o), wide(w.q_bias), wide(w.k_bias), wide(w.v_bias)};
}

at::Tensor or_zeros(const at::Tensor& bias, int64_t size, const at::Tensor& like) {
  return bias.defined() ? bias : at::zeros({size}, like.options());
}

at::Tensor with_last(const at::Tensor& x, double last) { return at::cat({x, at::full({1}, last, x.options())}); }

}  // namespace

std::map<std::string, at::Tensor> latent_layer(const AttentionWeights& weights, const at::Tensor& o_bias,
                                               const at::Tensor& input_norm, double scale,
                                               const LatentOptions& options) {
  const at::NoGradGuard no_grad;
  const auto dtype = weights.k.scalar_type();
  const auto rank = options.kv_lora_rank(), embed_dim = weights.q.size(1);
  ATTNPACK_CHECK(rank >= 2, "kv_lora_rank: got ", rank,
                 ", want at least 2: one number of the latent is a constant for its norm");
  ATTNPACK_CHECK(input_norm.defined() && input_norm.dim() == 1 && input_norm.size(0) == embed_dim,
                 "input_norm: got shape ", input_norm.sizes(), ", want the width of q, ", embed_dim);
  auto inner = options;
  auto made = factorise_latent(in_double(weights), inner.kv_lora_rank(rank - 1));
  const auto norm_before = input_norm.to(made.q.options());
  const auto dims = made.q.size(0) / options.num_heads();  // N + R
  const double rescale = scale * std::sqrt(static_cast<double>(dims));
  made.q.mul_(rescale);
  const auto latents = made.kv_a.narrow(0, 0, rank - 1),
             keys = made.kv_a.narrow(0, rank - 1, made.kv_a.size(0) - rank + 1);
  const auto bias = or_zeros(made.kv_a_bias, made.kv_a.size(0), made.kv_a);
  const auto latent_bias = bias.narrow(0, 0, rank - 1), key_bias = bias.narrow(0, rank - 1, keys.size(0));

  const auto norm = linear_norm(rank, largest_length(latents, latent_bias, norm_before), dtype);
  std::map<std::string, at::Tensor> result;
  const auto zero_row = at::zeros({1, embed_dim}, latents.options());
  result["kv_a_proj_with_mqa.weight"] = at::cat({latents * norm.shrink, zero_row, keys});
  result["kv_a_proj_with_mqa.bias"] = at::cat({with_last(latent_bias * norm.shrink, norm.constant), key_bias});
  result["kv_a_layernorm.weight"] = norm_weight(norm, rank, latents);
  result["kv_b_proj.weight"] = at::constant_pad_nd(made.kv_b / norm.gain, {0, 1});
  result["o_proj.weight"] = weights.o.detach().clone();
  result["o_proj.bias"] =
      o_bias.defined() ? o_bias.detach().clone() : at::zeros({weights.o.size(0)}, weights.o.options());
  if (made.q_bias.defined()) {
    made.q_bias.mul_(rescale);
    const auto width = embed_dim + 1;
    const auto inputs = at::eye(embed_dim, latents.options());
    const auto low = linear_norm(width, largest_input(norm_before), dtype);
    const double last = 1 / std::sqrt(static_cast<double>(width));  // the constant becomes about 1 behind the norm
    const double stored = at::scalar_tensor(last, at::kDouble).to(dtype).item<double>();
    result["q_a_proj.weight"] = at::cat({inputs * low.shrink, zero_row});
    result["q_a_proj.bias"] = with_last(at::zeros({embed_dim}, latents.options()), low.constant);
    result["q_a_layernorm.weight"] = with_last(at::full({embed_dim}, low.weight, latents.options()), stored);
    result["q_b_proj.weight"] = at::cat({made.q / low.gain, made.q_bias.unsqueeze(1) * (last / stored)}, 1);
  } else {
    result["q_proj.weight"] = made.q;
  }
  for (auto& [name, tensor] : result) tensor = tensor.to(dtype).contiguous();
  return result;
}

}  // namespace attnpack::convert
