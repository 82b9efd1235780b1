#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <tuple>
#include <vector>

#include <attnpack/ops/detail/schema.h>

namespace attnpack {

// A struct of arguments, with its tensors as SavedVariables: these keep no graph alive, and autograd notices if they
// change.
template <ArgumentStruct Args>
class SavedArguments {
 public:
  explicit SavedArguments(const Args& args) : args_(args) {
    for_each_tensor(args_, [&](std::optional<at::Tensor>& tensor) {
      saved_.emplace_back(tensor ? torch::autograd::SavedVariable(*tensor, false) : torch::autograd::SavedVariable());
      tensor = std::nullopt;
    });
  }

  Args unpack() const {
    Args args = args_;
    size_t i = 0;
    for_each_tensor(args, [&](std::optional<at::Tensor>& tensor) {
      const at::Tensor saved = saved_[i++].unpack();
      if (saved.defined()) tensor = saved;
    });
    return args;
  }

  void reset() {
    for (torch::autograd::SavedVariable& saved : saved_) saved.reset_data();
  }

 private:
  template <class F>
  static void for_each_tensor(Args& args, const F& f) {
    std::apply(
        [&](const auto&... member) {
          const auto visit = [&](const auto& x) {
            if constexpr (std::is_same_v<std::decay_t<decltype(x)>, std::optional<at::Tensor>>) f(detail::writable(x));
          };
          (visit(member), ...);
        },
        args.members());
  }

  Args args_;
  std::vector<torch::autograd::SavedVariable> saved_;
};

}  // namespace attnpack
