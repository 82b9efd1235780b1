#pragma once

#include <ATen/core/grad_mode.h>
#include <attnpack/core/check.h>

namespace attnpack::distributed {

// Raises in a backward that would itself be differentiated: its collectives have no derivative, and the second
// gradients would lack what other ranks hold.
inline void check_first_derivative() {
  ATTNPACK_CHECK(!at::GradMode::is_enabled(),
                 "create_graph: got true for a backward over several processes, want false: second derivatives are not "
                 "done there; take them on one process");
}

}  // namespace attnpack::distributed
