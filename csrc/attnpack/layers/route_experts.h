#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace attnpack {

// How a mixture of experts chooses from a router's logits.
struct RouteOptions {
  std::string scores = "softmax";  // of all experts' logits, or "sigmoid" of each one's
  int64_t top_k = 1;
  bool normalize = false;  // the chosen experts' scores are divided by their sum
  double scaling = 1.0;    // factor on the weights
  // Experts in groups of equal size (DeepSeek): those outside the top_groups best groups drop out. A group is as
  // good as its best expert for "softmax" (DeepSeek-V2), as its two best together for "sigmoid" (DeepSeek-V3).
  int64_t num_groups = 1, top_groups = 1;
};

// Weights [..., top_k] and int64 numbers [..., top_k] of the experts of each token. `correction` [experts] is added to
// the scores only for the choice (DeepSeek-V3), and gets no gradient.
std::tuple<at::Tensor, at::Tensor> route_experts(const at::Tensor& logits,  // [..., experts], fp32 or fp64
                                                 const std::optional<at::Tensor>& correction,
                                                 const RouteOptions& options);

// Checks that options choose among num_experts.
void check_route(const RouteOptions& options, int64_t num_experts);

}  // namespace attnpack
