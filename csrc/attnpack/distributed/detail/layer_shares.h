#pragma once

#include <attnpack/distributed/group.h>
#include <attnpack/modules/linear.h>

#include <memory>

namespace attnpack::distributed {

// How layers run when their weights are sharded over the ranks of a group.

// A layer whose outputs the ranks share: each of them gives a part of the gradient of its input. One that compares says
// so where the ranks' inputs have other shapes, at which gloo would end the process.
std::shared_ptr<const LinearShare> shared_outputs(const Group& group, bool compares);
// A layer whose inputs the ranks share: its output is the sum of theirs. The bias is whole, and added once.
std::shared_ptr<const LinearShare> shared_inputs(const Group& group);
// A layer of vocab_size outputs, which the ranks share and all get: the logits of a model.
std::shared_ptr<const LinearShare> shared_head(const Group& group, int64_t vocab_size);
// A table of vocab_size rows: each rank looks up the tokens that it has. The ranks compare their ids.
std::shared_ptr<const EmbeddingShare> shared_table(const Group& group, int64_t vocab_size);

}  // namespace attnpack::distributed
