#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/cuda/kernels/table.h>

namespace attnpack {

// The device of a call's tensors, and the stream that torch uses on it.
class Target {
 public:
  explicit Target(const at::Tensor& x)
      : guard_(x.device()),
        device_(x.device().index()),
        stream_(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(x.device()).native_handle()) {}
  int device() const { return device_; }
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  int device_;
  void* stream_;
};

inline void check_launch(const char* error) {
  TORCH_CHECK(!error, "attnpack: a CUDA kernel was not launched: ", error);
}

}  // namespace attnpack
