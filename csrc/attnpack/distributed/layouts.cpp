#include <attnpack/distributed/layouts.h>

#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/agreement.h>
#include <attnpack/distributed/detail/gather_sequence.h>
#include <attnpack/distributed/detail/names.h>
#include <attnpack/distributed/detail/sizes.h>

namespace attnpack::distributed {

namespace {

at::Tensor positions_of(Layout layout, int64_t length, int64_t ranks, int64_t rank, at::Device device) {
  std::vector<at::Tensor> parts;
  for (const auto& piece : pieces(layout, length, ranks, rank))
    parts.push_back(at::arange(piece.start, piece.stop, at::TensorOptions(at::kLong).device(device)));
  return at::cat(parts);
}

void check_dim(const at::Tensor& x, int64_t dim) {
  check_defined("x", x);
  ATTNPACK_CHECK(dim >= -x.dim() && dim < x.dim(), "dim: got ", dim, ", want that of the sequence in x ", x.sym_sizes(),
                 ", ", -x.dim(), " to ", x.dim() - 1);
}

}  // namespace

std::vector<Piece> pieces(Layout layout, int64_t length, int64_t ranks, int64_t rank, const char* name) {
  if (layout == Layout::kContiguous) return {{rank * length, (rank + 1) * length}};
  ATTNPACK_CHECK(length % 2 == 0, name, ": got ", length,
                 " positions on a rank, want an even number for the layout 'zigzag', which gives each rank two pieces: "
                 "pad the sequence and pass kv_lens, or take the layout 'contiguous'");
  const auto half = length / 2, last = 2 * ranks - 1 - rank;
  return {{rank * half, (rank + 1) * half}, {last * half, (last + 1) * half}};
}

at::Tensor positions(Layout layout, int64_t length, const Group& group, at::Device device) {
  return positions_of(layout, length, group->getSize(), group->getRank(), device);
}

at::Tensor rank_order(Layout layout, int64_t length, int64_t ranks, at::Device device) {
  std::vector<at::Tensor> orders;
  for (int64_t rank = 0; rank < ranks; ++rank) orders.push_back(positions_of(layout, length, ranks, rank, device));
  return at::cat(orders);
}

at::Tensor in_order(const at::Tensor& x, int64_t dim, Layout layout, int64_t ranks) {
  if (layout == Layout::kContiguous) return x;
  return x.index_select(dim, rank_order(layout, size_of(x, dim) / ranks, ranks, x.device()).argsort());
}

at::Tensor shard_sequence(const at::Tensor& x, const Group& group, int64_t dim, Layout layout) {
  check_dim(x, dim);
  const int64_t length = size_of(x, dim), ranks = group->getSize();
  const int64_t shares = ranks * (layout == Layout::kZigzag ? 2 : 1);
  ATTNPACK_CHECK(length % shares == 0, "x: got length ", length, " along dim ", dim, ", want a multiple of ", shares,
                 " for ", ranks, " ranks in the layout '", name_of(layout), "': pad it, and pass kv_lens");
  return x.index_select(dim, positions(layout, length / ranks, group, x.device()));
}

at::Tensor gather_sequence(const at::Tensor& x, const Group& group, int64_t dim, Layout layout, bool alike) {
  check_dim(x, dim);
  const int64_t ranks = group->getSize();
  pieces(layout, size_of(x, dim), ranks, group->getRank());  // checks
  const auto whole = gathered(x.movedim(dim, 0), group, alike);
  return in_order(whole, 0, layout, ranks).movedim(0, dim);
}

at::Tensor unshard_sequence(const at::Tensor& x, const Group& group, int64_t dim, Layout layout, bool alike) {
  agree("unshard_sequence", group, x.device(),
        {{"dim", std::to_string(dim)}, {"layout", name_of(layout)}, {"x", shown(x)}});
  return gather_sequence(x, group, dim, layout, alike);
}

}  // namespace attnpack::distributed
