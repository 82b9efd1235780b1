#pragma once

#include <ATen/ATen.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include <attnpack/core/check.h>

// torch.func.vmap calls the kernels of this folder for tensors with a hidden dim, the samples. A kernel takes the
// hidden dims out, calls the op once on plain tensors, and hides the samples of the results again.
namespace attnpack {

using at::Tensor;

// A tensor without its wrapper. If it is batched, its first dim are the samples.
struct Sampled {
  Tensor tensor;
  bool batched = false;
};

// The vmap that a kernel serves. While it lives, ops go to the next transform.
class VmapLevel {
 public:
  VmapLevel() : below_(c10::DispatchKey::FuncTorchBatched) {
    const auto layer = at::functorch::maybeCurrentDynamicLayer();
    ATTNPACK_CHECK(layer, "a tensor of torch.func.vmap is used outside of its function: return it from the function");
    level_ = layer->layerId();
  }

  Sampled unwrap(const Tensor& x) {
    const auto [tensor, dim] = at::functorch::unwrapTensorAtLevel(x, level_);
    if (!dim) return {tensor, false};
    samples_ = tensor.sym_size(*dim);
    return {tensor.movedim(*dim, 0), true};
  }
  std::optional<Sampled> unwrap(const std::optional<Tensor>& x) {
    return x ? std::make_optional(unwrap(*x)) : std::nullopt;
  }

  // Whether no tensor that was unwrapped had samples. Then the call belongs to another level.
  bool is_foreign() const { return !samples_; }
  const c10::SymInt& samples() const { return *samples_; }

  // [samples, ...], as a view.
  Tensor with_samples(const Sampled& x) const {
    if (x.batched) return x.tensor;
    std::vector<c10::SymInt> shape{samples()};
    for (const auto& size : x.tensor.sym_sizes()) shape.push_back(size);
    return x.tensor.unsqueeze(0).expand_symint(shape);
  }

  Tensor wrap(const Tensor& x) const { return at::functorch::makeBatched(x, 0, level_); }

 private:
  c10::impl::ExcludeDispatchKeyGuard below_;
  int64_t level_ = 0;
  std::optional<c10::SymInt> samples_;
};

}  // namespace attnpack
