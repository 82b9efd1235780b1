#include <attnpack/distributed/detail/names.h>

#include <attnpack/core/check.h>

namespace attnpack::distributed {

const char* name_of(Layout layout) { return layout == Layout::kZigzag ? "zigzag" : "contiguous"; }

const char* name_of(Method method) {
  return method == Method::kAllGather ? "allgather" : method == Method::kUlysses ? "ulysses" : "ring";
}

Layout layout_of(std::string_view name) {
  for (const auto layout : {Layout::kContiguous, Layout::kZigzag})
    if (name == name_of(layout)) return layout;
  ATTNPACK_CHECK(false, "layout: got '", name, "', want 'contiguous' or 'zigzag'");
}

Method method_of(std::string_view name) {
  for (const auto method : {Method::kAllGather, Method::kUlysses, Method::kRing})
    if (name == name_of(method)) return method;
  ATTNPACK_CHECK(false, "method: got '", name, "', want 'allgather', 'ulysses' or 'ring'");
}

}  // namespace attnpack::distributed
