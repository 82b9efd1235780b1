#pragma once

#include <attnpack/distributed/group.h>

#include <functional>
#include <vector>

namespace attnpack::distributed {

// Collectives of a group. Every process calls them in the same order, also in backward. An error of the backend comes
// as a sentence that names the rank.

// The sum of the x of all ranks, on each of them. No gradient.
at::Tensor all_reduce(const at::Tensor& x, const Group& group);
// The x of all ranks, one after the other: [n, ...] -> [ranks * n, ...]. No gradient.
at::Tensor all_gather(const at::Tensor& x, const Group& group);
// Rank 0's x, on all ranks. All give an x of this shape. No gradient.
at::Tensor from_first(const at::Tensor& x, const Group& group);

// Begins to send x to the next rank; the function returned waits for the x of the rank before, of the same shape. The
// ranks stand in a ring. No gradient.
std::function<at::Tensor()> pass_on(const at::Tensor& x, const Group& group);

// x, which all ranks hold alike and use differently: its gradient is the sum over the ranks.
at::Tensor copied(const at::Tensor& x, const Group& group);
// The sum over the ranks, which all ranks use alike: the gradient of each part is that of the sum.
at::Tensor summed(const at::Tensor& x, const Group& group);
// The parts [n, ...] of all ranks as [ranks * n, ...]. Where the ranks use the whole alike, a part's gradient is that
// of the part in any one of them; where they use it differently, it is the sum over the ranks.
at::Tensor gathered(const at::Tensor& x, const Group& group, bool alike);
// Pieces for the other ranks: send[r] numbers of x [n] go to rank r, and receive[r] come from it, in the order of the
// ranks. Gradients travel back.
at::Tensor exchanged(const at::Tensor& x, const std::vector<int64_t>& receive, const std::vector<int64_t>& send,
                     const Group& group);

}  // namespace attnpack::distributed
