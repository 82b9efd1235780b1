#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/models/detail/hf_settings.h>

#include <array>
#include <functional>
#include <string>

namespace attnpack {

// How a checkpoint stores its weights: plain, or in few bits with scales, as `quantization_config` in config.json says.
// Loaded models compute with the numbers of the weights; activations are not rounded to FP8.
class HfQuantization {
 public:
  using Cut = std::function<at::Tensor(const at::Tensor&)>;

  // Raises for a method, and for a setting of it, that cannot be read.
  explicit HfQuantization(const HfSettings& config);

  // The name of the tensor with the scales of the stored tensor of that name; empty for one that never has scales.
  std::string scales_of(const std::string& stored) const;
  // The part of a stored weight that `cut` cuts out, as numbers. No cut: all of it.
  at::Tensor numbers(const at::Tensor& stored, const at::Tensor& scales, const Cut& cut) const;

 private:
  enum class Method { kNone, kFp8, kMxfp4 };

  Method method_ = Method::kNone;
  std::array<int64_t, 2> block_{};  // rows and columns of FP8 that share a scale
};

}  // namespace attnpack
