#include <attnpack/layers/chunks.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/mask_columns.h>

namespace attnpack {

at::Tensor mask_of_chunks(const at::Tensor& counted, c10::SymInt keys, int64_t chunk,
                          const std::optional<at::Tensor>& mask) {
  ATTNPACK_CHECK(chunk > 0, "chunk: got ", chunk, ", want how many positions a chunk has, 1 or more");
  const auto columns = at::arange(covers_positions(mask) ? mask->sym_size(-1) : keys, counted.options());
  const auto rows = counted.div(chunk, "floor").unsqueeze(-1);  // [L, 1] or [B, L, 1]
  auto same = rows == columns.div(chunk, "floor");
  if (same.dim() == 3) same = same.unsqueeze(1);  // [B, 1, L, keys]
  if (!mask) return same;
  if (mask->scalar_type() == at::kBool) return same.logical_and(*mask);
  return mask->masked_fill(same.logical_not(), -std::numeric_limits<double>::infinity());
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("mask_of_chunks(Tensor counted, SymInt keys, int chunk, Tensor? mask=None) -> Tensor",
        &attnpack::mask_of_chunks);
}
