#pragma once

#include <attnpack/distributed/detail/agreement.h>
#include <attnpack/ops/attention.h>

#include <functional>

namespace attnpack::distributed {

// Raises for options of the operator that are not supported over several processes.
void refuse_unshared(const AttentionOptions& options);

// Options as ranks compare them.
std::vector<std::pair<std::string, std::string>> rule_texts(const AttentionOptions& options);

// Raises on every rank, unless `validate` passes on all of them and they say the same. An error of it is among what a
// rank says; where all have it, each raises its own.
void agree_on(const std::string& what, const Group& group, at::Device device,
              std::vector<std::pair<std::string, std::string>> texts, const std::function<void()>& validate);

}  // namespace attnpack::distributed
