#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/core/stored.h>

namespace attnpack {

// The format of stored weights, by their shape. `name` is what an error calls them.
const StoredLayout& stored_layout(const char* name, const at::Tensor& weight);
// That of rows whose numbers are wanted in dtype.
const StoredLayout& widened_layout(const at::Tensor& blocks, at::ScalarType dtype);

}  // namespace attnpack
