#pragma once

// A group that counts the bytes that this rank sends to others, beside the check of the arguments.
#include <attnpack/distributed/group.h>

#include <memory>
#include <numeric>

namespace ranks {

class CountedBackend : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  CountedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<int64_t> sent)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), sent_(std::move(sent)) {}

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  Work allreduce(std::vector<at::Tensor>& x, const c10d::AllreduceOptions& o) override {
    throw std::runtime_error("not counted");
  }
  Work allgather_into_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                       const c10d::AllgatherOptions& o) override {
    if (in[0].scalar_type() != at::kByte) add(in[0].nbytes() * (getSize() - 1));
    return inner_->allgather_into_tensor_coalesced(out, in, o);
  }
  Work reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                       const c10d::ReduceScatterOptions& o) override {
    add(out[0].nbytes() * (getSize() - 1));
    return inner_->reduce_scatter_tensor_coalesced(out, in, o);
  }
  Work alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& receive, std::vector<int64_t>& send,
                     const c10d::AllToAllOptions& o) override {
    const auto all = std::accumulate(send.begin(), send.end(), int64_t{0});
    add((all - send[getRank()]) * static_cast<int64_t>(in.itemsize()));
    return inner_->alltoall_base(out, in, receive, send, o);
  }

 private:
  void add(int64_t bytes) { *sent_ += bytes; }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<int64_t> sent_;
};

struct Counted {
  attnpack::distributed::Group group;
  std::shared_ptr<int64_t> sent;

  // The bytes since the last call.
  int64_t take() const { return std::exchange(*sent, 0); }
};

inline Counted counted(const attnpack::distributed::Group& plain) {
  const auto sent = std::make_shared<int64_t>(0);
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(nullptr, plain->getRank(), plain->getSize());
  const auto inner = plain->getBackend(c10::DeviceType::CPU);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                    c10::make_intrusive<CountedBackend>(inner, sent));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return {group, sent};
}

}  // namespace ranks
