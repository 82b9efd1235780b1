#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <attnpack/modules/state_dict.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace attnpack {

// A module that maps every token by itself: a norm or a feed-forward.
class TokenModule {
 public:
  virtual ~TokenModule() = default;
  virtual at::Tensor forward(const at::Tensor& x) = 0;  // [..., E] -> [..., E]
  // E, if the module has one.
  virtual std::optional<int64_t> embed_dim() const { return std::nullopt; }
};

// A module handed to a container, as a holder or a shared_ptr. It must be an Interface too.
template <typename Interface>
class Part {
 public:
  Part() = default;
  /* implicit */ Part(std::nullptr_t) {}
  template <typename Impl>
  /* implicit */ Part(const torch::nn::ModuleHolder<Impl>& holder)
      : Part(holder.is_empty() ? nullptr : std::shared_ptr<torch::nn::Module>(holder.ptr())) {}
  /* implicit */ Part(std::shared_ptr<torch::nn::Module> module)
      : module_(std::move(module)), interface_(dynamic_cast<Interface*>(module_.get())) {
    TORCH_CHECK_TYPE(!module_ || interface_, "attnpack: got a module of type ", module_->name(),
                     ", which does not do what its place needs (", c10::demangle(typeid(Interface).name()), ")");
  }
  // From shared_ptr<Impl> to Part takes two conversions, and C++ makes one by itself.
  template <typename Impl>
  /* implicit */ Part(const std::shared_ptr<Impl>& impl) : Part(std::shared_ptr<torch::nn::Module>(impl)) {}

  Interface* operator->() const { return interface_; }
  explicit operator bool() const { return module_ != nullptr; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  Part clone(const std::optional<at::Device>& device) const { return module_->clone(device); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
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
