#pragma once

#include <attnpack/convert/merge_heads.h>

namespace attnpack::convert {

struct LatentOptions {
  LatentOptions(int64_t num_heads, int64_t num_kv_heads, int64_t kv_lora_rank)
      : num_heads_(num_heads), num_kv_heads_(num_kv_heads), kv_lora_rank_(kv_lora_rank) {}
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(int64_t, num_kv_heads);
  TORCH_ARG(int64_t, kv_lora_rank);
  TORCH_ARG(std::optional<std::vector<int64_t>>, head_map);
  // The frequencies that rotate the first 2 * inv_freq.size() dims of a head; empty: no RoPE.
  TORCH_ARG(std::vector<double>, inv_freq);
  TORCH_ARG(bool, interleaved) = false;
  // How many pairs of the joined key rotate by each frequency, from 0 to num_kv_heads; empty: one.
  TORCH_ARG(std::vector<int64_t>, pairs);
  // The factor that RoPE applies to cos and sin.
  TORCH_ARG(double, rope_factor) = 1.0;
  // The distances for which keys without rotation are made: 0 to length - 1, and with causal false both directions.
  TORCH_ARG(int64_t, length) = 512;
  TORCH_ARG(bool, causal) = true;
  TORCH_ARG(Calibration, calibration);
};

// Weights of MultiHeadLatentAttention with latent_norm false; H heads, N = V = head_dim, R twice the sum of pairs, C
// kv_lora_rank. A bias is undefined where there was none.
struct LatentWeights {
  at::Tensor q;          // [H * (N + R), E]
  at::Tensor q_bias;     // [H * (N + R)]
  at::Tensor kv_a;       // [C + R, E]
  at::Tensor kv_a_bias;  // [C + R]
  at::Tensor kv_b;       // [H * (N + V), C]
};

// Makes the keys and values of all kv heads one latent per token: their joint principal components. Errors of keys
// count as queries see them, errors of values as o sees them, and both are relative. Without RoPE the result is exact
// from C = 2 Hkv head_dim on (more is padded with zeros). With RoPE, the pairs of a frequency, one of each kv head,
// first become the rotating pairs that all heads share: their leading complex components. The rest of the keys goes
// into the latent, where nothing rotates: there the queries are multiplied by the mean of e^(i theta distance), the
// best constant in place of the rotation. That loses accuracy, except where every frequency has as many pairs as there
// are kv heads; then the shared key is the keys of all heads together. (After TransMLA, Meng et al. 2025, and MHA2MLA,
// Ji et al. 2025, which drop the rotation of the rest.)
LatentWeights factorise_latent(const AttentionWeights& weights, const LatentOptions& options);

// The loss of the scores, relative to their mean square, where a component of a frequency does not rotate: its mean
// square times 1 - |mean of e^(i theta distance)|^2. [frequencies, Hkv], the leading component first; fp64.
at::Tensor rotation_losses(const AttentionWeights& weights, const LatentOptions& options);

// The pairs of each frequency that keep the most: rope_dim / 2 in all.
std::vector<int64_t> choose_pairs(const at::Tensor& losses,  // [frequencies, Hkv], of a layer, or the sum over layers
                                  int64_t rope_dim);

}  // namespace attnpack::convert
