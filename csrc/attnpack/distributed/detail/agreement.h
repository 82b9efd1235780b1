#pragma once

#include <attnpack/distributed/group.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attnpack::distributed {

// Whether ranks compare their calls: on the CPU, unless ATTNPACK_CHECK=0. On other devices it would wait for the
// device, so there only under ATTNPACK_CHECK=1.
bool compares(const Group& group, at::Device device);

// Shape and dtype of a tensor, and whether it wants a gradient, as ranks compare them: "float32 [2, 3]", or "none".
std::string shown(const std::optional<at::Tensor>& tensor);

// A number of the bytes that is the same on all machines (FNV-1a).
uint64_t hash_of(std::string_view bytes);

// Raises on every rank, unless all ranks say the same of the call `what`. Ranks that mean different calls would wait
// for each other, or give wrong results. It is one small collective, where ranks compare.
void agree(const std::string& what, const Group& group, at::Device device,
           const std::vector<std::pair<std::string, std::string>>& texts);

}  // namespace attnpack::distributed
