#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>
#include <attnpack/ops/cuda/kernels/place.cuh>

namespace attnpack::cuda {
namespace {

template <class S, bool Rotates>
__global__ void __launch_bounds__(kPlaceThreads) place_kernel(const __grid_constant__ PlaceParams p) {
  __shared__ PlaceShared shared;
  place_block<S, Rotates>(p, blockIdx.x, shared);
}

constexpr int kLengthThreads = 128;
__global__ void __launch_bounds__(kLengthThreads) advance_kernel(const __grid_constant__ PlaceParams p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kLengthThreads + threadIdx.x;
  if (b < p.batch) advance_length(p, b);
}

// Rows that are copied as they are need no more than the size of their numbers.
template <class F>
const char* with_bytes(int64_t bytes, F&& f) {
  return bytes == 1 ? f(uint8_t{}) : bytes == 2 ? f(uint16_t{}) : bytes == 4 ? f(uint32_t{}) : f(uint64_t{});
}

}  // namespace

const char* place(const PlaceParams& p, int device, void* stream) {
  const int64_t groups = (p.num_heads + 2 * p.num_kv_heads + kPlaceRows - 1) / kPlaceRows, blocks = p.tokens * groups;
  const char* error =
      p.rotates ? with_storage(p.dtype,
                               [&](auto storage) {
                                 return launch(place_kernel<decltype(storage), true>, blocks, kPlaceThreads, 0, device,
                                               stream, p);
                               })
                : with_bytes(p.element_size, [&](auto storage) {
                    return launch(place_kernel<decltype(storage), false>, blocks, kPlaceThreads, 0, device, stream, p);
                  });
  // A kernel of its own, because all tokens read the lengths first.
  const int64_t length_blocks = (p.batch + kLengthThreads - 1) / kLengthThreads;
  return error ? error : launch(advance_kernel, length_blocks, kLengthThreads, 0, device, stream, p);
}

}  // namespace attnpack::cuda
