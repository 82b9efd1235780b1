#include <attnpack/ops/detail/latent_rows.h>

#include <ATen/ATen.h>

#include <attnpack/ops/quantize.h>

namespace attnpack {

using at::Tensor;
using c10::SymInt;

SymInt sym_latent_row_bytes(const SymInt& latent_dim, const SymInt& rotated_dim, at::ScalarType dtype) {
  return sym_quantized_row_bytes(kLatentBits, latent_dim) + rotated_dim * static_cast<int64_t>(c10::elementSize(dtype));
}

Tensor latent_rows(const Tensor& latents, const SymInt& latent_dim) {
  const Tensor codes = quantize_rows(latents.narrow_symint(3, 0, latent_dim), kLatentBits);
  const Tensor rotated = latents.narrow_symint(3, latent_dim, latents.sym_size(3) - latent_dim);
  return at::cat({codes, rotated.contiguous().view(at::kByte)}, -1);
}

Tensor latents_of_rows(const Tensor& rows, const SymInt& latent_dim, at::ScalarType dtype) {
  const SymInt codes = sym_quantized_row_bytes(kLatentBits, latent_dim);
  const Tensor c = dequantize_rows(rows.narrow_symint(3, 0, codes), kLatentBits, latent_dim, dtype);
  if (rows.sym_size(3) == codes) return c;
  const Tensor rotated = rows.narrow_symint(3, codes, rows.sym_size(3) - codes);
  // A copy, because numbers of a dtype begin at multiples of their size.
  return at::cat({c, rotated.clone(at::MemoryFormat::Contiguous).view(dtype)}, -1);
}

}  // namespace attnpack
