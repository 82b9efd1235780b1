#include <array>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/usable.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

__global__ void image_kernel() {}

struct CudaRuntime {
  int driver_version() const {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  }
  int runtime_version() const {
    int version = 0;
    return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 1 << 30;
  }
  int major(int device) const {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major;
  }
  bool has_image(int device) const {
    int before = 0;
    cudaFuncAttributes attributes;
    const bool has = cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device) == cudaSuccess &&
                     cudaFuncGetAttributes(&attributes, image_kernel) == cudaSuccess;
    cudaSetDevice(before);
    cudaGetLastError();  // a missing image is an answer, not an error of the next call
    return has;
  }
};

bool usable(int device) {
  static Usable<CudaRuntime> answers{CudaRuntime{}};
  return answers(device);
}

Device ask_device(int device) {
  int count = 1, shared = 48 * 1024, major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  int before = 0;
  const char* wanted = std::getenv("ATTNPACK_CUDA_SM90");  // 0: the kernels of other devices, to compare with
  const bool sm90 = !(wanted && std::string_view(wanted) == "0") && cudaGetDevice(&before) == cudaSuccess &&
                    cudaSetDevice(device) == cudaSuccess && has_sm90_image();
  cudaSetDevice(before);
  return {count, shared, sm90, 10 * major + minor};
}

Device describe_device(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> asked;
  static std::array<Device, kMaxDevices> answers;
  if (device < 0 || device >= kMaxDevices) return ask_device(device);
  std::call_once(asked[device], [&] { answers[device] = ask_device(device); });
  return answers[device];
}

ForwardPlan plan(const AttentionParams& p, int64_t most_group, int device) {
  return plan_forward(p, most_group, describe_device(device));
}

bool reads_source(const AttentionParams& p, int64_t most_group, int device) {
  const Device described = describe_device(device);
  return p.quantized_bits ? reads_quantized(p, most_group, described) : reads_pages(p, most_group, described);
}

const char* forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  const bool from_source = p.quantized_bits || (p.block_table && plan.kernel == ForwardKernel::kDecode);
  const auto launch_kernel = from_source                                 ? forward_from_source
                             : plan.kernel == ForwardKernel::kPrefill    ? forward_prefill
                             : plan.kernel == ForwardKernel::kDecode     ? forward_decode
                             : plan.kernel == ForwardKernel::kLatent     ? forward_latent
                             : plan.kernel == ForwardKernel::kSm90       ? forward_sm90
                             : plan.kernel == ForwardKernel::kLatentSm90 ? latent_sm90
                                                                         : forward_exact;
  const char* error = launch_kernel(p, plan, workspace, device, stream);
  if (!error && plan.parts > 1) error = merge_forward(p, plan, workspace, device, stream);
  return error;
}

BackwardPlan plan_of_backward(const AttentionBackwardParams& bp, int64_t most_group, int device) {
  return plan_backward(bp, most_group, describe_device(device));
}

const char* backward(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                     void* stream) {
  return plan.sm90        ? backward_sm90(bp, plan, workspace, device, stream)
         : plan.width > 0 ? backward_mma(bp, plan, workspace, device, stream)
                          : backward_exact(bp, plan.most_group, device, stream);
}

int capability(int device) { return describe_device(device).capability; }

constexpr CudaKernels kTable{usable, plan,     forward, reads_source, plan_of_backward, backward,
                             place,  quantize, rope,    linear,       capability};
[[maybe_unused]] const bool registered = (set_cuda_kernels(&kTable), true);

}  // namespace
}  // namespace attnpack::cuda
