#pragma once

#include <attnpack/distributed/group.h>

#include <string>

namespace attnpack::distributed {

// The name by which c10d's registry, and so torch's collective ops, know the group. A group without one gets it.
std::string name_of(const Group& group);

// The group that is registered under the name; raises where there is none.
Group group_of(const std::string& name);

}  // namespace attnpack::distributed
