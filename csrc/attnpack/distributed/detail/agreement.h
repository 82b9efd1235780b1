#pragma once

#include <attnpack/distributed/group.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attnpack::distributed {

// Shape and dtype of a tensor, and whether it wants a gradient, as ranks compare them: "float [2, 3]", or "none".
std::string shown(const std::optional<at::Tensor>& tensor);

// Raises on every rank, unless all ranks say the same of the call `what`. Ranks that mean different calls would wait
// for each other, or give wrong results. On the CPU this is one small collective, which ATTNPACK_CHECK=0 leaves out. On
// other devices it would wait for the device, so it runs only under ATTNPACK_CHECK=1.
void agree(const std::string& what, const Group& group, at::Device device,
           const std::vector<std::pair<std::string, std::string>>& said);

}  // namespace attnpack::distributed
