#pragma once

#include <attnpack/distributed/detail/agreement.h>
#include <attnpack/ops/attention.h>

#include <functional>

namespace attnpack::distributed {

// Raises for options of the operator that are not done over several processes.
void refuse_unshared(const AttentionOptions& options);

// Options as ranks compare them.
std::vector<std::pair<std::string, std::string>> said_of(const AttentionOptions& options);

// Raises on every rank, unless `judge` passes on all of them and they say the same. The rank whose judge failed raises
// its error.
void agree_on(const std::string& what, const Group& group, at::Device device,
              std::vector<std::pair<std::string, std::string>> said, const std::function<void()>& judge);

}  // namespace attnpack::distributed
