#include <attnpack/distributed/group.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/detail/error_text.h>
#define USE_C10D_GLOO  // else the header is empty
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace attnpack::distributed {

Group gloo_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout) {
  ATTNPACK_CHECK(store, "store: got none, want a c10d::FileStore or c10d::TCPStore that all processes open");
  ATTNPACK_CHECK(size >= 1, "size: got ", size, ", want the number of processes, at least 1");
  ATTNPACK_CHECK(rank >= 0 && rank < size, "rank: got ", rank, ", want a number from 0 to ", size - 1,
                 ", another one in each process");
  using c10d::ProcessGroupGloo;
  const auto gloo = c10d::ProcessGroup::BackendType::GLOO;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  try {
    const auto options = ProcessGroupGloo::Options::create_default(timeout);
    group->setBackend(c10::DeviceType::CPU, gloo, c10::make_intrusive<ProcessGroupGloo>(store, rank, size, options));
  } catch (const std::exception& error) {
    TORCH_CHECK(false, text_of({"attnpack: rank ", rank, " did not find the other processes within ", timeout.count(),
                                " ms, want ", size,
                                " of them: start each with a rank of its own, and all with the same store (",
                                error_text(error), ")"}));
  }
  group->setDefaultBackend(gloo);
  return group;
}

}  // namespace attnpack::distributed
