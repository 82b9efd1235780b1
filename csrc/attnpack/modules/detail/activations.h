#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace attnpack {

// Whether an activation of FeedForward has a gate.
bool has_gate(const std::string& activation);

// f(gate) * up of an activation with a gate.
at::Tensor gated_by(const std::string& activation, const at::Tensor& gate, const at::Tensor& up);

}  // namespace attnpack
