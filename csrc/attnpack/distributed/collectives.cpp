#include <attnpack/distributed/collectives.h>

#include <attnpack/distributed/detail/first_derivative.h>
#include <attnpack/distributed/detail/words.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

namespace attnpack::distributed {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Runs a part of a collective, and says in words what an error of the backend means.
template <typename Run>
auto explained(const Group& group, const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "attnpack: a collective of ", group->getSize(), " processes failed on rank ", group->getRank(),
                ": another process died, called something else, or did not come within the group's timeout; results "
                "of this step are lost, so start the processes again from a checkpoint (",
                words_of(error), ")");
  }
}

template <typename Start>
void finish(const Group& group, const Start& start) {
  explained(group, [&] { start()->wait(); });
}

// [ranks * n, ...] as ranks tensors [n, ...], views.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, int64_t ranks) {
  return whole.unflatten(0, {ranks, whole.size(0) / ranks}).unbind(0);
}

// The sum over the ranks of this rank's part of x [ranks * n, ...].
at::Tensor reduce_scatter(const at::Tensor& x, const Group& group) {
  const int64_t ranks = group->getSize();
  std::vector<std::vector<at::Tensor>> inputs{parts_of(x.contiguous(), ranks)};
  std::vector<at::Tensor> sum{at::empty_like(inputs[0][0])};
  finish(group, [&] { return group->reduce_scatter(sum, inputs); });
  return sum[0];
}

using Counts = std::vector<int64_t>;

// Begins to send send[r] numbers of x [n] to each rank r; the function returned waits for receive[r] numbers of each.
std::function<at::Tensor()> begin_exchange(const at::Tensor& x, Counts receive, Counts send, const Group& group) {
  const at::NoGradGuard no_grad;
  auto out = at::empty({std::accumulate(receive.begin(), receive.end(), int64_t{0})}, x.options());
  if (out.numel() + x.numel() == 0) return [out] { return out; };
  auto in = x.detach().contiguous();
  auto work =
      explained(group, [&] { return group->getBackend(x.device().type())->alltoall_base(out, in, receive, send); });
  return [=] {
    explained(group, [&] { work->wait(); });
    return out;
  };
}

struct Copied : torch::autograd::Function<Copied> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Group& group) {
    context->saved_data["group"] = group;
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    check_first_derivative();
    return {all_reduce(grads[0], context->saved_data["group"].toCustomClass<c10d::ProcessGroup>()), {}};
  }
};

struct Summed : torch::autograd::Function<Summed> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, const Group& group) { return all_reduce(x, group); }
  static variable_list backward(AutogradContext*, variable_list grads) {
    check_first_derivative();
    return {grads[0], {}};
  }
};

struct Gathered : torch::autograd::Function<Gathered> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Group& group, bool alike) {
    context->saved_data["group"] = group;
    context->saved_data["alike"] = alike;
    return all_gather(x, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    check_first_derivative();
    const auto group = context->saved_data["group"].toCustomClass<c10d::ProcessGroup>();
    const auto own = context->saved_data["alike"].toBool() ? parts_of(grads[0], group->getSize())[group->getRank()]
                                                           : reduce_scatter(grads[0], group);
    return {own, {}, {}};
  }
};

struct Exchanged : torch::autograd::Function<Exchanged> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Counts& receive, const Counts& send,
                            const Group& group) {
    context->saved_data["receive"] = receive;
    context->saved_data["send"] = send;
    context->saved_data["group"] = group;
    return begin_exchange(x, receive, send, group)();
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    check_first_derivative();
    auto& saved = context->saved_data;
    const auto group = saved["group"].toCustomClass<c10d::ProcessGroup>();
    return {begin_exchange(grads[0], saved["send"].toIntVector(), saved["receive"].toIntVector(), group)(), {}, {}, {}};
  }
};

}  // namespace

at::Tensor all_reduce(const at::Tensor& x, const Group& group) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sum{x.clone(at::MemoryFormat::Contiguous)};
  finish(group, [&] { return group->allreduce(sum); });
  return sum[0];
}

at::Tensor all_gather(const at::Tensor& x, const Group& group) {
  const at::NoGradGuard no_grad;
  const int64_t ranks = group->getSize();
  auto sizes = x.sizes().vec();
  sizes[0] *= ranks;
  const auto whole = at::empty(sizes, x.options());
  std::vector<std::vector<at::Tensor>> outputs{parts_of(whole, ranks)};
  std::vector<at::Tensor> input{x.detach().contiguous()};
  finish(group, [&] { return group->allgather(outputs, input); });
  return whole;
}

at::Tensor from_first(const at::Tensor& x, const Group& group) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sent{x.clone(at::MemoryFormat::Contiguous)};
  finish(group, [&] { return group->broadcast(sent); });  // from rank 0 by default
  return sent[0];
}

std::function<at::Tensor()> pass_on(const at::Tensor& x, const Group& group) {
  const int64_t ranks = group->getSize(), rank = group->getRank();
  Counts receive(ranks, 0), send(ranks, 0);
  receive[(rank + ranks - 1) % ranks] = send[(rank + 1) % ranks] = x.numel();
  return [coming = begin_exchange(x.reshape(-1), receive, send, group), sizes = x.sizes().vec()] {
    return coming().view(sizes);
  };
}

at::Tensor copied(const at::Tensor& x, const Group& group) { return Copied::apply(x, group); }

at::Tensor summed(const at::Tensor& x, const Group& group) { return Summed::apply(x, group); }

at::Tensor gathered(const at::Tensor& x, const Group& group, bool alike) { return Gathered::apply(x, group, alike); }

at::Tensor exchanged(const at::Tensor& x, const std::vector<int64_t>& receive, const std::vector<int64_t>& send,
                     const Group& group) {
  return Exchanged::apply(x, receive, send, group);
}

}  // namespace attnpack::distributed
