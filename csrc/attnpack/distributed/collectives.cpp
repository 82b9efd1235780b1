#include <attnpack/distributed/collectives.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <attnpack/core/text.h>
#include <attnpack/distributed/detail/error_text.h>
#include <attnpack/distributed/detail/group_names.h>
#include <attnpack/distributed/detail/sizes.h>
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
    TORCH_CHECK(
        false,
        text_of({"attnpack: a collective of ", group->getSize(), " processes failed on rank ", group->getRank(),
                 ": another process died, called something else, or did not come within the group's timeout; results "
                 "of this step are lost, so start the processes again from a checkpoint (",
                 error_text(error), ")"}));
  }
}

// Starts a collective, an op of _c10d_functional: torch.compile and dispatch modes see it. The type of the group's name
// in their schemas differs between releases of torch, so the call is boxed.
template <typename... Argument>
at::Tensor start(const char* name, const Group& group, const at::Tensor& x, Argument... arguments) {
  const at::NoGradGuard no_grad;
  return explained(group, [&] {
    torch::jit::Stack stack;
    torch::jit::push(stack, x.detach().contiguous(), std::move(arguments)..., name_of(group));
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
    return stack.front().toTensor();
  });
}

at::Tensor wait(const at::Tensor& started, const Group& group) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  const at::NoGradGuard no_grad;
  return explained(group, [&] { return op.call(started); });
}

const std::string kSum = "sum";

using Counts = std::vector<int64_t>;

// Begins to send send[r] numbers of x [n] to each rank r; the function returned waits for receive[r] numbers of each.
std::function<at::Tensor()> begin_exchange(const at::Tensor& x, Counts receive, Counts send, const Group& group) {
  const auto arriving = std::accumulate(receive.begin(), receive.end(), int64_t{0});
  if (arriving + count_of(x) == 0) return [x] { return x.detach(); };  // no rank has anything for another one
  const auto started = start("_c10d_functional::all_to_all_single", group, x, std::move(receive), std::move(send));
  return [=] { return wait(started, group); };
}

// Backward calls functions that have a derivative themselves, so that second derivatives are right.

Group group_of(const AutogradContext* context) {
  return context->saved_data.at("group").toCustomClass<c10d::ProcessGroup>();
}

struct Copied : torch::autograd::Function<Copied> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Group& group) {
    context->saved_data["group"] = group;
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto group = group_of(context);
    return {summed(copied(grads[0], group), group), {}};
  }
};

struct Summed : torch::autograd::Function<Summed> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, const Group& group) { return all_reduce(x, group); }
  static variable_list backward(AutogradContext*, variable_list grads) { return {grads[0], {}}; }
};

// The sum over the ranks of this rank's part of x [ranks * n, ...].
struct Scattered : torch::autograd::Function<Scattered> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Group& group) {
    context->saved_data["group"] = group;
    return wait(start("_c10d_functional::reduce_scatter_tensor", group, x, kSum, int64_t{group->getSize()}), group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {gathered(grads[0], group_of(context), /*alike=*/false), {}};
  }
};

struct Gathered : torch::autograd::Function<Gathered> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Group& group, bool alike) {
    context->saved_data["group"] = group;
    context->saved_data["alike"] = alike;
    return all_gather(x, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto group = group_of(context);
    const auto length = size_of(grads[0], 0) / group->getSize();
    const auto local = context->saved_data["alike"].toBool() ? grads[0].narrow(0, group->getRank() * length, length)
                                                             : Scattered::apply(grads[0], group);
    return {local, {}, {}};
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
    const auto& saved = context->saved_data;
    const auto receive = saved.at("receive").toIntVector(), send = saved.at("send").toIntVector();
    return {exchanged(grads[0], send, receive, group_of(context)), {}, {}, {}};
  }
};

}  // namespace

at::Tensor all_reduce(const at::Tensor& x, const Group& group) {
  return wait(start("_c10d_functional::all_reduce", group, x, kSum), group);
}

at::Tensor all_gather(const at::Tensor& x, const Group& group) {
  return wait(start("_c10d_functional::all_gather_into_tensor", group, x, int64_t{group->getSize()}), group);
}

at::Tensor from_first(const at::Tensor& x, const Group& group) {
  return wait(start("_c10d_functional::broadcast", group, x, int64_t{0}), group);
}

std::function<at::Tensor()> pass_on(const at::Tensor& x, const Group& group) {
  const int64_t ranks = group->getSize(), rank = group->getRank();
  Counts receive(ranks, 0), send(ranks, 0);
  receive[(rank + ranks - 1) % ranks] = send[(rank + 1) % ranks] = count_of(x);
  return [coming = begin_exchange(x.reshape(-1), receive, send, group), sizes = x.sym_sizes().vec()] {
    return coming().view_symint(sizes);
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
