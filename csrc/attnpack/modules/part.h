#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <attnpack/modules/state_dict.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace attnpack {

// Base of what a block asks of its parts.
class PartInterface {
 public:
  virtual ~PartInterface() = default;
};

// A module that maps every token by itself: a norm or a feed-forward.
class TokenModule : public PartInterface {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;  // [..., E] -> [..., E]
  // (x + added, forward of this sum); a module may do both at once.
  virtual std::tuple<at::Tensor, at::Tensor> forward_sum(const at::Tensor& x, const at::Tensor& added) {
    const auto sum = x + added;
    return {sum, forward(sum)};
  }
  // E, if the module has one.
  virtual std::optional<int64_t> embed_dim() const { return std::nullopt; }
};

namespace detail {

// forward of a module, for a tensor.
struct CallForward {
  template <typename Impl>
  auto operator()(Impl& impl) const -> decltype(impl.forward(std::declval<const at::Tensor&>()));
};

// A TokenModule that calls a module which is none, such as a torch::nn::Sequential.
class Adapter : public TokenModule {
 public:
  // The same around a copy of the module.
  virtual std::shared_ptr<Adapter> around(const std::shared_ptr<torch::nn::Module>& copy) const = 0;
};

template <typename Impl>
class AdapterOf : public Adapter {
 public:
  explicit AdapterOf(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  at::Tensor forward(const at::Tensor& x) override { return impl_->forward(x); }
  std::shared_ptr<Adapter> around(const std::shared_ptr<torch::nn::Module>& copy) const override {
    return std::make_shared<AdapterOf>(std::dynamic_pointer_cast<Impl>(copy));
  }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace detail

// A module handed to a container, as a holder or a shared_ptr. It must be an Interface too. But a TokenModule may be
// any module whose forward maps a tensor to a tensor, such as torch::nn::Linear and torch::nn::Sequential.
template <typename Interface>
class Part {
  // Whether an Impl takes an adapter: it is a module of torch or of the user.
  template <typename Impl>
  static constexpr bool adapts =
      std::is_same_v<Interface, TokenModule> && !std::is_base_of_v<PartInterface, Impl> &&
      !std::is_same_v<Impl, torch::nn::Module> && std::is_invocable_r_v<at::Tensor, detail::CallForward, Impl&>;

 public:
  Part() = default;
  /* implicit */ Part(std::nullptr_t) {}
  template <typename Impl>
  /* implicit */ Part(const torch::nn::ModuleHolder<Impl>& holder)
      : Part(holder.is_empty() ? nullptr : std::shared_ptr<Impl>(holder.ptr())) {}
  /* implicit */ Part(std::shared_ptr<torch::nn::Module> module)
      : module_(std::move(module)), interface_(dynamic_cast<Interface*>(module_.get())) {
    TORCH_CHECK_TYPE(!module_ || interface_, "attnpack: got a module of type ", module_->name(),
                     ", which does not do what its place needs (", c10::demangle(typeid(Interface).name()), ")");
  }
  // From shared_ptr<Impl> to Part takes two conversions, and C++ makes one by itself.
  template <typename Impl, std::enable_if_t<!adapts<Impl>, int> = 0>
  /* implicit */ Part(const std::shared_ptr<Impl>& impl) : Part(std::shared_ptr<torch::nn::Module>(impl)) {}
  template <typename Impl, std::enable_if_t<adapts<Impl>, int> = 0>
  /* implicit */ Part(const std::shared_ptr<Impl>& impl)
      : module_(impl), adapter_(impl ? std::make_shared<detail::AdapterOf<Impl>>(impl) : nullptr) {
    interface_ = adapter_.get();
  }

  Interface* operator->() const { return interface_; }
  explicit operator bool() const { return module_ != nullptr; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  // The module as a Kind, a holder or an Impl; nullptr if it is another. As torch::nn::Module::as.
  template <typename Kind>
  auto* as() const {
    return module_ ? module_->template as<Kind>() : nullptr;
  }
  Part clone(const std::optional<at::Device>& device) const {
    if constexpr (std::is_same_v<Interface, TokenModule>) {
      if (adapter_) return Part(module_->clone(device), *adapter_);
    }
    return module_->clone(device);
  }

 private:
  Part(std::shared_ptr<torch::nn::Module> copy, const detail::Adapter& like)
      : module_(std::move(copy)), adapter_(like.around(module_)) {
    interface_ = adapter_.get();
  }

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<detail::Adapter> adapter_;  // of a module that is no Interface
  Interface* interface_ = nullptr;
};

// Base of modules made of parts that were handed in. Derived::for_each_part(f) calls f(name, part) for each part that
// it has; its constructor ends with register_parts(). As in torch's Sequential, clone() clones the parts, and reset()
// has nothing to make. If one weight stands in two places (one embedding for encoder and decoder), it is one weight of
// the clone too, unless its module is not attnpack's.
template <typename Derived>
class Container : public torch::nn::Cloneable<Derived> {
 public:
  void reset() override {}

  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<Derived>(static_cast<const Derived&>(*this));
    copy->for_each_part([&](const std::string& name, auto& part) {
      part = part.clone(device);
      copy->replace_module(name, part.module());
    });
    tie_as(*this, *copy);
    copy_requires_grad(*this, *copy);
    return copy;
  }

  // Each parameter once, for optimisers. This hides LibTorch's parameters(), which is not virtual and names a shared
  // weight once per place. Through a torch::nn::Module, or through a module of your own around this one, call
  // distinct_parameters.
  std::vector<at::Tensor> parameters(bool recurse = true) const {
    return recurse ? distinct_parameters(*this) : torch::nn::Module::parameters(false);
  }

 protected:
  void register_parts() {
    static_cast<Derived&>(*this).for_each_part(
        [this](const std::string& name, auto& part) { this->register_module(name, part.module()); });
  }
};

}  // namespace attnpack
