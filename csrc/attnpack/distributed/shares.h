#pragma once

#include <attnpack/distributed/group.h>
#include <attnpack/modules/state_dict.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace attnpack::distributed {

// Which part of each parameter of a module this rank holds, and which the others: what tensor_parallel gives. It turns
// a checkpoint of one process into this rank's tensors, and back. Names that it does not know, and parameters that
// every rank holds whole, pass as they are.
class TensorShares {
 public:
  // The part of one parameter that each rank holds: rows along `dim`, of `size`. Several ranks may hold one row.
  struct Share {
    int64_t dim, size;
    std::vector<at::Tensor> rows;  // of each rank, int64
  };

  TensorShares(Group group, std::map<std::string, Share> shares)
      : group_(std::move(group)), shares_(std::move(shares)) {}

  // This rank's part of the state dict of one process, for load_state_dict. Nothing is sent. Tensors that are
  // mapped from a file (load_safetensors) are read only in this part. Raises for a tensor of another length.
  StateDict part_of(const StateDict& whole) const;

  // The state dict of one process, from those of all ranks, which call this together: on each of them, bit for bit what
  // was dealt out. A weight in two places is one tensor. Gradients or moments of an optimiser do as well, under the
  // names of their parameters. Raises on all ranks where a tensor is no part, or the ranks give other names or shapes.
  StateDict whole_of(const StateDict& part) const;

 private:
  Group group_;
  std::map<std::string, Share> shares_;
};

}  // namespace attnpack::distributed
