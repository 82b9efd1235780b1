#pragma once

#include <attnpack/distributed/attention.h>

#include <string_view>

// The layouts and methods by name, as errors, ops and Python have them.
namespace attnpack::distributed {

const char* name_of(Layout layout);
const char* name_of(Method method);

// Raise for a name that there is not.
Layout layout_of(std::string_view name);
Method method_of(std::string_view name);

}  // namespace attnpack::distributed
