#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <cstring>

#include <attnpack/core/check.h>
#include <attnpack/ops/cuda/kernels/table.h>

namespace attnpack {

// The device of a call's tensors, and the stream that torch uses on it. Host tests call the ops on CPU tensors, with a
// table of emulated kernels: there is no stream then.
class Target {
 public:
  explicit Target(const at::Tensor& x)
      : guard_(x.device()),
        device_(x.device().index()),
        stream_(x.is_cpu() ? nullptr : c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(x.device()).native_handle()) {}
  int device() const { return device_; }
  void* stream() const { return stream_; }

 private:
  c10::OptionalDeviceGuard guard_;
  int device_;
  void* stream_;
};

// Whether the environment asks for checks that wait for the device (ATTNPACK_CHECK=1).
inline bool checks_numbers() {
  const char* asked = std::getenv("ATTNPACK_CHECK");
  return asked && std::strcmp(asked, "1") == 0;
}

inline void check_launch(const char* error) {
  TORCH_CHECK(!error, "attnpack: a CUDA kernel was not launched: ", error);
}

}  // namespace attnpack
