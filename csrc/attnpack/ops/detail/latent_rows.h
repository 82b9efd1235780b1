#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

// Latents as bytes: c quantised to 8 bits (ops/quantize.h), then the rotated k_rope as it is. 4 bits are not offered:
// rotated latents lose more than plain ones (mlx-lm#1555), and only the rotated part tells one position from another.
namespace attnpack {

constexpr int64_t kLatentBits = 8;

c10::SymInt sym_latent_row_bytes(const c10::SymInt& latent_dim, const c10::SymInt& rotated_dim, at::ScalarType dtype);

at::Tensor latent_rows(const at::Tensor& latents,       // [B, 1, L, C + R]
                       const c10::SymInt& latent_dim);  // -> [B, 1, L, sym_latent_row_bytes(C, R, dtype)] uint8

at::Tensor latents_of_rows(const at::Tensor& rows,         // [B, 1, L, sym_latent_row_bytes(C, R, dtype)] uint8
                           const c10::SymInt& latent_dim,  // C
                           at::ScalarType dtype);          // -> [B, 1, L, C + R]

}  // namespace attnpack
