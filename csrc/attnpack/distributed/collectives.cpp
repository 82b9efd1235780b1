#include <attnpack/distributed/collectives.h>

#include <attnpack/distributed/detail/words.h>
#include <torch/csrc/autograd/custom_function.h>

namespace attnpack::distributed {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Waits for a collective, and says in words what an error of the backend means.
template <typename Start>
void finish(const Group& group, const Start& start) {
  try {
    start()->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "attnpack: a collective of ", group->getSize(), " processes failed on rank ", group->getRank(),
                ": another process died, called something else, or did not come within the group's timeout; results "
                "of this step are lost, so start the processes again from a checkpoint (",
                words_of(error), ")");
  }
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

struct Copied : torch::autograd::Function<Copied> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Group& group) {
    context->saved_data["group"] = group;
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {all_reduce(grads[0], context->saved_data["group"].toCustomClass<c10d::ProcessGroup>()), {}};
  }
};

struct Summed : torch::autograd::Function<Summed> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, const Group& group) { return all_reduce(x, group); }
  static variable_list backward(AutogradContext*, variable_list grads) { return {grads[0], {}}; }
};

struct Gathered : torch::autograd::Function<Gathered> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Group& group, bool alike) {
    context->saved_data["group"] = group;
    context->saved_data["alike"] = alike;
    return all_gather(x, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto group = context->saved_data["group"].toCustomClass<c10d::ProcessGroup>();
    const auto own = context->saved_data["alike"].toBool() ? parts_of(grads[0], group->getSize())[group->getRank()]
                                                           : reduce_scatter(grads[0], group);
    return {own, {}, {}};
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

at::Tensor copied(const at::Tensor& x, const Group& group) { return Copied::apply(x, group); }

at::Tensor summed(const at::Tensor& x, const Group& group) { return Summed::apply(x, group); }

at::Tensor gathered(const at::Tensor& x, const Group& group, bool alike) { return Gathered::apply(x, group, alike); }

}  // namespace attnpack::distributed
