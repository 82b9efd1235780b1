#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

// Functions of the Python package that a replacement calls. A C++ program without Python sets none.
namespace attnpack {

struct ReplacementHooks {
  // After the first enable (true) and after the last disable (false).
  std::function<void(bool enabled)> changed;
  // Whether the operator may take tensors of these classes, which are not plain: those of a tracer, for one.
  std::function<bool(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask)>
      takes;
};

void set_sdpa_hooks(ReplacementHooks hooks);

}  // namespace attnpack
