#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace attnpack::distributed {

// Processes that compute together. Any group of torch will do; each process calls the same functions with its own.
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// A group of `size` processes on the CPU, which exchange tensors through gloo. They find each other through the store,
// such as a c10d::FileStore or a c10d::TCPStore; each calls this with its own rank. Where a process does not come, to
// this call or to a collective, the others raise after the timeout.
Group gloo_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                 std::chrono::milliseconds timeout = std::chrono::minutes(30));

}  // namespace attnpack::distributed
