#pragma once

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>
#include <vector>

#include <attnpack/ops/detail/unknown_sizes.h>

// Scores of some query rows at a time: those of all rows would take heads * length * keys numbers.
namespace attnpack {

using at::Tensor;

// The scores that are held at a time.
constexpr int64_t kPieceBytes = int64_t{1} << 22;

// The rows of x [..., length or 1, n] that begin at `first`.
inline Tensor narrow_rows(const Tensor& x, int64_t first, const c10::SymInt& rows) {
  return x.dim() >= 2 && !is_one(x.sym_size(-2)) ? x.narrow_symint(-2, first, rows) : x;
}

// Calls call(rows of query, first row) -> [B, heads, rows, n] for some rows of query [B, H, L, D] at a time, which read
// `keys` keys, and joins the results. A graph is to hold for other lengths, so it takes all rows at once.
template <typename Call>
Tensor in_row_pieces(const Tensor& query, const c10::SymInt& keys, const Call& call) {
  const auto batch = query.sym_size(0).maybe_as_int(), heads = query.sym_size(1).maybe_as_int();
  const auto length = query.sym_size(2).maybe_as_int(), width = keys.maybe_as_int();
  if (!batch || !heads || !length || !width || at::isTensorSubclassLike(query)) return call(query, 0);
  const int64_t of_row = std::max<int64_t>(*batch * *heads * *width * sizeof(float), 1);
  const int64_t rows = std::max<int64_t>(kPieceBytes / of_row, 1);
  if (*length <= rows) return call(query, 0);
  Tensor out;  // made first: small tensors that are kept between large ones cut the memory to pieces
  std::vector<Tensor> differentiable;
  int64_t first = 0;
  for (const Tensor& part : query.split(rows, 2)) {
    const Tensor piece = call(part, first);
    if (piece.requires_grad()) {
      differentiable.push_back(piece);
    } else {
      if (!out.defined()) out = at::empty({*batch, piece.size(1), *length, piece.size(3)}, piece.options());
      out.narrow(2, first, part.size(2)).copy_(piece);
    }
    first += part.size(2);
  }
  return differentiable.empty() ? out : at::cat(differentiable, 2);
}

}  // namespace attnpack
