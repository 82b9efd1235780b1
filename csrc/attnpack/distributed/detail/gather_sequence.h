#pragma once

#include <attnpack/distributed/layouts.h>

namespace attnpack::distributed {

// unshard_sequence of parts that the ranks have agreed on.
at::Tensor gather_sequence(const at::Tensor& x, const Group& group, int64_t dim, Layout layout, bool alike);

}  // namespace attnpack::distributed
