#pragma once

#include <attnpack/distributed/group.h>
#include <attnpack/distributed/shares.h>
#include <torch/nn/module.h>

namespace attnpack::distributed {

// Shares a module out over the ranks of a group, in place (Shoeybi et al. 2019). It may be any module of attnpack that
// holds attention or feed-forwards, CausalLM included, with the same weights on all ranks. Each rank then has a share
// of the query heads, the kv heads that these read, and a share of the hidden numbers and of the vocabulary: rows of
// the embedding and of the head. Its KV cache holds only its own kv heads. Norms and the table of learned positions
// stay whole. Inputs and outputs are those of one process, the same on all ranks, logits too; so are the gradients of
// what is whole, and those of kv heads that several ranks hold are summed. A weight in two places stays one. generate
// gives all ranks the tokens that rank 0 chooses; its callback must answer alike on all of them.
//
// Parameters have the shapes of this rank's share, so make the optimiser after this call. The result loads a checkpoint
// of one process into them, and gives one back: load_state_dict(module, shares.part_of(load_safetensors(path))) and
// save_safetensors(shares.whole_of(state_dict(module)), path). Raises, before anything changes, where the heads do not
// divide among the ranks; for qk_norm over all heads; for dropout; and for a weight that has another share in another
// place. forward_with_weights gives the weights of this rank's heads, and a mask of its own for each head must be
// theirs.
TensorShares tensor_parallel(torch::nn::Module& module, const Group& group);

}  // namespace attnpack::distributed
