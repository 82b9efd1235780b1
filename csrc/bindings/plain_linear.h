#pragma once

#include <bindings/torch_pybind.h>

#include <optional>

// torch's linear layers, read without the calls of Python that their attributes would cost.
namespace attnpack {

// The weight [out, in] of a layer whose class is nn.Linear itself, with hooks or without.
std::optional<at::Tensor> linear_weight(const py::handle& layer);

}  // namespace attnpack
