#pragma once

#include <torch/nn/cloneable.h>

#include <string>

namespace attnpack {

// Where and in which dtype a module's parameters are made; unset means torch's defaults.
struct Factory {
  std::optional<at::Device> device;
  std::optional<at::ScalarType> dtype;

  at::TensorOptions options() const { return at::TensorOptions().device(device).dtype(dtype); }
};

// Raises unless the bytes of a parameter are an int64. `names` are the options that its sizes come from.
void check_parameter_size(const char* names, at::IntArrayRef sizes, size_t element_bytes);

// A module that owns parameters which another tensor may replace (torch::nn::Module can only copy into them).
class ParameterOwner {
 public:
  virtual ~ParameterOwner() = default;
  // Whether the parameter may become a tensor of another shape: the same weight in stored blocks, or as numbers again.
  virtual bool takes(const std::string& /*name*/, const at::Tensor& /*tensor*/) const { return false; }
  virtual void assign_parameter(const std::string& name, const at::Tensor& tensor) = 0;
};

// Base of the modules that own parameters. Derived::bind_members() reads its tensor members back from parameters_.
template <typename Derived>
class LeafModule : public torch::nn::Cloneable<Derived>, public ParameterOwner {
 public:
  void assign_parameter(const std::string& name, const at::Tensor& tensor) override {
    this->parameters_[name] = tensor;
    static_cast<Derived*>(this)->bind_members();
  }

  // A dtype is for numbers: LibTorch's own functions would also convert the bytes of stored weights.
  using torch::nn::Module::to;
  void to(at::ScalarType dtype, bool non_blocking = false) override {
    for (const auto& child : this->children()) child->to(dtype, non_blocking);
    for (auto tensors : {this->named_parameters(/*recurse=*/false), this->named_buffers(/*recurse=*/false)})
      for (auto& item : tensors)
        if (item->is_floating_point()) item->set_data(item->to(dtype, non_blocking));
  }
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) override {
    torch::nn::Module::to(device, non_blocking);
    to(dtype, non_blocking);
  }

 protected:
  // A clone is allocated where the original lies: .to() or an assignment may have moved the original from the options'
  // device.
  // `names` are the options that the sizes come from, for an error.
  at::Tensor allocate(const char* names, at::IntArrayRef sizes, const at::Tensor& before,
                      const Factory& factory) const {
    const auto options = before.defined() ? before.options().requires_grad(false) : factory.options();
    check_parameter_size(names, sizes, options.dtype().itemsize());
    return at::empty(sizes, options);
  }
};

}  // namespace attnpack
