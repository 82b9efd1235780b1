#pragma once

#include <attnpack/distributed/group.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attnpack::distributed {

// Shape and dtype of a tensor, as ranks compare them: "float [2, 3]", or "none".
std::string shown(const std::optional<at::Tensor>& tensor);

// Raises on every rank, unless all ranks say the same of the call `what`. Ranks that mean different calls would wait
// for each other, or give wrong results.
void agree(const std::string& what, const Group& group, const std::vector<std::pair<std::string, std::string>>& said);

}  // namespace attnpack::distributed
