#pragma once

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <vector>

namespace attnpack {

// The numbers of an int32 or int64 tensor of any device. Tensors inside a torch.func transform have no memory.
inline std::vector<int64_t> read_numbers(const at::Tensor& tensor) {
  std::vector<int64_t> numbers;
  if (at::isTensorSubclassLike(tensor)) {
    for (int64_t i = 0; i < tensor.size(0); ++i) numbers.push_back(tensor.select(0, i).item<int64_t>());
    return numbers;
  }
  const at::Tensor plain = tensor.to(at::kCPU, at::kLong).contiguous();
  numbers.assign(plain.const_data_ptr<int64_t>(), plain.const_data_ptr<int64_t>() + plain.numel());
  return numbers;
}

}  // namespace attnpack
