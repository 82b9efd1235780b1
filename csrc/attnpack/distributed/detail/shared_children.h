#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace attnpack::distributed {

// How the ranks share a layer, a norm or a parameter of a module under tensor parallelism: kOutputs is torch's
// ColwiseParallel, kInputs its RowwiseParallel.
enum class ParallelStyle {
  kOutputs,  // a rank has the outputs of its query heads, or of its hidden numbers
  kKeys,     // the same for the kv heads that its query heads read; several ranks may have one
  kInputs,   // a rank has the inputs of its heads or hidden numbers: outputs are summed, and the bias is added once
  kWhole,    // every rank has all of it, for its own heads: the gradient is the sum over the ranks
};

struct SharedChild {
  const char* name;
  ParallelStyle style;
  bool reads_x = false;  // it reads the module's input, of whose gradient each rank then gives a part
};

// The children of a class of modules, and their only list: tensor_parallel of both languages shares by it.
c10::ArrayRef<SharedChild> shared_children(std::string_view kind);

// How the ranks share the parameter `name` of such a module: "outputs", "keys", "inputs" or "whole", or "added" for a
// bias that is added once. Raises for one that is on no list, because it would be shared wrongly. `owner`: the module,
// for the error.
const char* style_of_parameter(std::string_view kind, const std::string& owner, const std::string& name);

// Raise for heads that cannot be shared.
void check_heads(const std::string& owner, int64_t num_heads, int64_t ranks);
void check_norm_of_heads(bool all_heads, int64_t num_heads);

}  // namespace attnpack::distributed
