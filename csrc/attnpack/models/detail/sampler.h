#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace attnpack {

// How a token is chosen from logits: the likeliest, or drawn.
class Sampler {
 public:
  Sampler(std::optional<double> temperature, std::optional<int64_t> top_k, std::optional<double> top_p,
          std::optional<uint64_t> seed, at::Device device);

  at::Tensor operator()(const at::Tensor& logits);  // [B, V] -> [B] int64

 private:
  at::Tensor probabilities(const at::Tensor& logits) const;

  bool greedy_;
  double temperature_, top_p_;
  int64_t top_k_;
  std::optional<at::Generator> generator_;
};

}  // namespace attnpack
