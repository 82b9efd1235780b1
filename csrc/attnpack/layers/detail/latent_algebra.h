#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <tuple>

namespace attnpack {

// The algebra of latent attention (DeepSeek-V2, 2024, section 2.1 and appendix C). H: heads. N, R, V: the dims of a
// head that are not rotated, that are rotated, and of its values. C: kv_lora_rank. For each head kv_b [H * (N + V), C]
// holds W_UK [N, C] and W_UV [V, C].

// W_UK^T q of every head, so that scores need only the latents.
at::Tensor fold_query(const at::Tensor& query,  // [B, H, L, N]
                      const at::Tensor& kv_b);  // [H * (N + V), C] -> [B, H, L, C]

// W_UV c of every head.
at::Tensor unfold_output(const at::Tensor& context,  // [B, H, L, C]
                         const at::Tensor& kv_b,     // [H * (N + V), C]
                         const c10::SymInt& v_dim);  // -> [B, H, L, V]

// Keys [B, H, K, N + R] and values [B, H, K, V]. kv: the latents multiplied by kv_b.
std::tuple<at::Tensor, at::Tensor> expand_latents(const at::Tensor& latents,      // [B, 1, K, C + R]
                                                  const at::Tensor& kv,           // [B, K, H * (N + V)]
                                                  const c10::SymInt& latent_dim,  // C
                                                  const c10::SymInt& num_heads, const c10::SymInt& v_dim);

// The weights of a module without kv_b. W_UK is folded into the query projection's [H * (N + R), I], W_UV into the
// output projection's [E, H * V]. Computed in fp64, rounded once.
std::tuple<at::Tensor, at::Tensor> fold_weights(const at::Tensor& query, const at::Tensor& kv_b, const at::Tensor& out,
                                                int64_t num_heads);  // -> [H * (C + R), I], [E, H * C]

// Multiply-adds per head and sequence, for L queries over K keys:
//   expanded  K C (N + V) for the keys and values, L K (N + R + V) for attention
//   absorbed  L C (N + V) for the queries and outputs, L K (2 C + R) for attention
// So absorbed is cheaper where (K - L) C (N + V) > L K (2 C - N - V): for V3's shape, up to some 170 queries.
bool absorbed_is_cheaper(const c10::SymInt& q_len, const c10::SymInt& kv_len, const c10::SymInt& nope_dim,
                         const c10::SymInt& v_dim, const c10::SymInt& latent_dim);

}  // namespace attnpack
