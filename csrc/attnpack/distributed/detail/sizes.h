#pragma once

#include <ATen/core/Tensor.h>

// Sizes as numbers, which ranks exchange. A graph that is traced is then one for these sizes.
namespace attnpack::distributed {

inline int64_t size_of(const at::Tensor& x, int64_t dim) { return x.sym_size(dim).guard_int(__FILE__, __LINE__); }

inline int64_t count_of(const at::Tensor& x) { return x.sym_numel().guard_int(__FILE__, __LINE__); }

}  // namespace attnpack::distributed
