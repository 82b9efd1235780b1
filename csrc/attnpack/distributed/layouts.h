#pragma once

#include <attnpack/distributed/group.h>

#include <vector>

namespace attnpack::distributed {

// How a sequence is dealt out over R ranks. kContiguous: rank r has the r-th of R equal pieces. kZigzag: it has the
// r-th and the r-th last of 2 R equal pieces, so that causal attention is the same work for every rank.
enum class Layout { kContiguous, kZigzag };

// Positions from start to stop - 1 of the whole sequence.
struct Piece {
  int64_t start, stop;
};

// The pieces that a rank's `length` rows are; raises if they do not divide. `name` is that of the rows, for an error.
std::vector<Piece> pieces(Layout layout, int64_t length, int64_t ranks, int64_t rank, const char* name = "x");

// The positions in the whole sequence of this rank's `length` rows, int64 [length]: what RoPE wants.
at::Tensor positions(Layout layout, int64_t length, const Group& group, at::Device device = at::kCPU);

// The positions in the whole sequence of the rows of all ranks, `length` each, rank after rank: int64 [ranks * length].
at::Tensor rank_order(Layout layout, int64_t length, int64_t ranks, at::Device device = at::kCPU);

// The whole sequence along `dim`, from the parts of the ranks one after the other.
at::Tensor in_order(const at::Tensor& x, int64_t dim, Layout layout, int64_t ranks);

// This rank's part of x, a copy: [B, L, E] -> [B, L / ranks, E]. Raises unless the length along `dim` divides by the
// ranks, by twice the ranks in kZigzag.
at::Tensor shard_sequence(const at::Tensor& x, const Group& group, int64_t dim = 1,
                          Layout layout = Layout::kContiguous);

// The whole sequence on every rank, from the parts of all. Where `alike`, each rank computes the same from it, and
// backward takes the part of this rank; else it takes the sum over the ranks. On the CPU it raises on every rank where
// parts differ in shape or dtype.
at::Tensor unshard_sequence(const at::Tensor& x, const Group& group, int64_t dim = 1,
                            Layout layout = Layout::kContiguous, bool alike = true);

}  // namespace attnpack::distributed
