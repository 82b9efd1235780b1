#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/layers/layer_inputs.h>

#include <optional>
#include <string>
#include <tuple>

namespace attnpack {

// All rules but a head map: all heads read the same latents.
struct LatentAttendOptions : LayerInputs {
  // The keys that each query may attend, by their positions (with a cache: of the cache), as in the operator.
  std::optional<at::Tensor> key_index = std::nullopt;  // [B, 1, L, n]
};

// Latent attention after its projections: rotate, append the latents to the cache, attend by one of two equal paths,
// join the heads. `path`: "expanded" makes keys and values of all latents (kv_b); "absorbed" folds W_UK into the
// queries and W_UV into the outputs, and reads only the latents; "auto" takes the cheaper path (absorbed_is_cheaper).
// Without kv_b, query and output are in the latent space already. scale is that of the scores, by default 1 / sqrt(N +
// R). The cache's key holds the latents; its value has no width.
at::Tensor latent_attend(const at::Tensor& query,                // [B, H, L, N + R], before rotation; the last R rotate
                         const at::Tensor& latent,               // [B, Lkv, C], after its norm
                         const at::Tensor& k_rope,               // [B, Lkv, R], before rotation
                         const std::optional<at::Tensor>& kv_b,  // [H * (N + V), C]
                         int64_t v_dim, const std::string& path,
                         const LatentAttendOptions& options = {});  // -> [B, L, H * V], without kv_b [B, L, H * C]

// The same, and the probabilities before dropout, [B, H, L, keys]; at_names as in attend_with_weights.
std::tuple<at::Tensor, at::Tensor> latent_attend_with_weights(
    const at::Tensor& query, const at::Tensor& latent, const at::Tensor& k_rope, const std::optional<at::Tensor>& kv_b,
    int64_t v_dim, const std::string& path, const LatentAttendOptions& options = {}, bool at_names = false);

// Query, key and value as they enter the operator, without a cache. The path decides their form; "auto" means
// "expanded".
std::tuple<at::Tensor, at::Tensor, at::Tensor> latent_project(const at::Tensor& query, const at::Tensor& latent,
                                                              const at::Tensor& k_rope,
                                                              const std::optional<at::Tensor>& kv_b, int64_t v_dim,
                                                              const std::string& path,
                                                              const LatentAttendOptions& options);

// The two halves of latent_project: the rotated query, and the rotated latents [B, 1, Lkv, C + R]; and heads of them.
std::tuple<at::Tensor, at::Tensor> latent_rotate(const at::Tensor& query, const at::Tensor& latent,
                                                 const at::Tensor& k_rope, const LatentAttendOptions& options);
std::tuple<at::Tensor, at::Tensor, at::Tensor> latent_heads(
    const at::Tensor& query,                // [B, H, L, N + R], rotated
    const at::Tensor& latents,              // [B, 1, Lkv, C + R], rotated
    int64_t rotated_dim,                    // R
    const std::optional<at::Tensor>& kv_b,  // [H * (N + V), C]
    int64_t v_dim, const std::string& path,
    const std::optional<at::Tensor>& kv_lens = std::nullopt);  // [B], for gradients beyond which nothing counts

}  // namespace attnpack
