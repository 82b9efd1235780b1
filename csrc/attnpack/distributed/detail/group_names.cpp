#include <attnpack/distributed/detail/group_names.h>

#include <attnpack/core/text.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <mutex>

namespace attnpack::distributed {

namespace {

bool is_registered(const std::string& name, const Group& group) {
  if (name.empty()) return false;
  try {
    return c10d::resolve_process_group(name) == group;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

std::string name_of(const Group& group) {
  static std::mutex one;  // ranks may be threads of one process
  static int64_t number = 0;
  const std::lock_guard<std::mutex> lock(one);
  if (is_registered(group->getGroupName(), group)) return group->getGroupName();
  const auto name = text_of({"attnpack_", number++});
  c10d::register_process_group(name, group);
  group->setGroupName(name);
  return name;
}

Group group_of(const std::string& name) { return c10d::resolve_process_group(name); }

}  // namespace attnpack::distributed
