#pragma once

#include <array>
#include <atomic>

// Whether the kernels can run on a device. Runtime: the few functions of the CUDA runtime that answer it, so that host
// tests can stand in for drivers and devices.
namespace attnpack::cuda {

// The tensor-core kernels need cp.async, ldmatrix and mma.m16n8k16, which came with sm_80. A driver runs the code of
// its own major version and of older ones. Only asking for a kernel tells whether the build has an image for the
// device.
template <class Runtime>
bool can_run_on(Runtime& runtime, int device) {
  return runtime.driver_version() / 1000 >= runtime.runtime_version() / 1000 && runtime.major(device) >= 8 &&
         runtime.has_image(device);
}

// Answers are kept: each op asks.
template <class Runtime>
class Usable {
 public:
  explicit Usable(Runtime runtime) : runtime_(runtime) {}
  bool operator()(int device) {
    if (device < 0) return false;
    if (device >= kMaxDevices) return can_run_on(runtime_, device);
    std::atomic<signed char>& answer = answers_[device];
    if (answer == kUnknown) answer = can_run_on(runtime_, device) ? kYes : kNo;
    return answer == kYes;
  }

 private:
  static constexpr int kMaxDevices = 64;
  static constexpr signed char kUnknown = 0, kYes = 1, kNo = 2;
  Runtime runtime_;
  std::array<std::atomic<signed char>, kMaxDevices> answers_{};
};

}  // namespace attnpack::cuda
