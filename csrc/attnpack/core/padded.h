#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/core/check.h>

#include <string>

namespace attnpack {

// Raises for at::Tensor(), which holds nothing.
inline void check_defined(const char* name, const at::Tensor& tensor) {
  ATTNPACK_CHECK(tensor.defined(), name,
                 " is undefined, wants a tensor with a shape and numbers: assign it before the ",
                 "call; where it is optional, leave it out or give std::nullopt");
}

// Raises for an undefined tensor, and for a nested one, which nothing here takes.
inline void check_padded(const std::string& name, const at::Tensor& tensor) {
  check_defined(name.c_str(), tensor);
  ATTNPACK_CHECK(!tensor.is_nested(), name, " is a nested tensor, wants a padded one: call ",
                 "torch.nested.to_padded_tensor(", name, ", 0.0) and say by kv_lens or a mask which tokens are real");
}

// The same, and raises for a sparse tensor.
inline void check_dense(const std::string& name, const at::Tensor& tensor) {
  check_padded(name, tensor);
  ATTNPACK_CHECK(tensor.layout() == at::kStrided, name, " has the layout ", tensor.layout(),
                 ", wants a dense tensor: call .to_dense() on it");
}

}  // namespace attnpack
