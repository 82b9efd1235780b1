#pragma once

#include <attnpack/distributed/group.h>
#include <attnpack/distributed/shares.h>
#include <torch/nn/module.h>

namespace attnpack::distributed {

// Shares a module out over the ranks of a group, in place (Shoeybi et al. 2019). It may be any module of attnpack that
// holds attention or feed-forwards, CausalLM included, with the same weights on all ranks. Each rank
// then has a share of the query heads, the kv heads that these read, and a share of the hidden numbers; its KV cache
// holds its kv heads alone. Embedding, head and norms stay whole. Inputs and outputs are those of one process, the same
// on all ranks, and so are the gradients of what is whole; those of kv heads that several ranks hold are summed.
//
// Parameters have the shapes of this rank's share, so make the optimiser after this call. The result loads a checkpoint
// of one process into them, and gives one back: load_state_dict(module, shares.part_of(load_safetensors(path))) and
// save_safetensors(shares.whole_of(state_dict(module)), path). Raises, before anything
// changes, where the heads do not divide among the ranks; for qk_norm over all heads; later for dropout in training.
TensorShares tensor_parallel(torch::nn::Module& module, const Group& group);

}  // namespace attnpack::distributed
