#pragma once

#include "cuda_run.h"

#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/cuda/kernels/place.cuh>
#include <attnpack/ops/cuda/kernels/quantize.cuh>

// The table of libattnpack_cuda with emulated kernels. The CUDA ops then run on CPU tensors, without torch's CUDA.
namespace attnpack::cuda {

inline int64_t& launches() {
  static int64_t count = 0;
  return count;
}

inline Device& emulated_device() {
  static Device device{};
  return device;
}

// Calls f with one value of the storage type.
template <class F>
void with_emulated_storage(DType dtype, const F& f) {
  dtype == DType::kFloat64    ? f(double{})
  : dtype == DType::kFloat32  ? f(float{})
  : dtype == DType::kBFloat16 ? f(BFloat16{})
                              : f(Float16{});
}

inline ForwardPlan emulated_plan(const AttentionParams& p, int64_t most_group, int) {
  return plan_forward(p, most_group, emulated_device());
}
inline const char* emulated_forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int, void*) {
  launches() += plan.parts > 1 ? 2 : 1;
  with_emulated_storage(p.dtype, [&](auto storage) { run_forward<decltype(storage)>(p, plan, workspace, 7); });
  return nullptr;
}
inline BackwardPlan emulated_plan_backward(const AttentionBackwardParams& bp, int64_t most_group, int) {
  return plan_backward(bp, most_group, emulated_device());
}
inline const char* emulated_backward(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int,
                                     void*) {
  launches() += 3;
  with_emulated_storage(bp.forward.dtype,
                        [&](auto storage) { run_backward<decltype(storage)>(bp, plan, workspace, 6); });
  return nullptr;
}
inline bool emulated_reads_source(const AttentionParams& p, int64_t most_group, int) {
  return p.quantized_bits ? reads_quantized(p, most_group, emulated_device())
                          : reads_pages(p, most_group, emulated_device());
}
template <class S, bool Rotates>
void run_place(const PlaceParams& p) {
  const int64_t groups = (p.num_heads + 2 * p.num_kv_heads + kPlaceRows - 1) / kPlaceRows;
  run_blocks<PlaceShared>(p.tokens * groups, kPlaceThreads, 8, [&](int64_t i, void* shared) {
    place_block<S, Rotates>(p, i, *static_cast<PlaceShared*>(shared));
  });
}
inline const char* emulated_place(const PlaceParams& p, int, void*) {
  launches() += 2;
  if (p.rotates)
    with_emulated_storage(p.dtype, [&](auto storage) { run_place<decltype(storage), true>(p); });
  else
    p.element_size == 1   ? run_place<uint8_t, false>(p)
    : p.element_size == 2 ? run_place<uint16_t, false>(p)
    : p.element_size == 4 ? run_place<uint32_t, false>(p)
                          : run_place<uint64_t, false>(p);
  for (int64_t b = 0; b < p.batch; ++b) advance_length(p, b);
  return nullptr;
}
inline const char* emulated_quantize(const QuantizeParams& p, RowsTo to, int64_t rows, int, void*) {
  ++launches();
  with_emulated_storage(p.dtype, [&](auto storage) {
    run_blocks<QuantizeShared>(
        (rows + kQuantizeWarps - 1) / kQuantizeWarps, kQuantizeThreads, 9, [&](int64_t i, void* shared) {
          quantize_block<decltype(storage)>(p, to, rows, i, *static_cast<QuantizeShared*>(shared));
        });
  });
  return nullptr;
}

// Puts the emulated kernels in, of one device, for as long as it lives.
class EmulatedKernels {
 public:
  explicit EmulatedKernels(const Device& device = {8, 227 * 1024}) {
    emulated_device() = device;
    static constexpr CudaKernels kTable{[](int) { return true; },
                                        emulated_plan,
                                        emulated_forward,
                                        emulated_reads_source,
                                        emulated_plan_backward,
                                        emulated_backward,
                                        emulated_place,
                                        emulated_quantize,
                                        nullptr,
                                        nullptr,
                                        [](int) { return emulated_device().capability; }};
    set_cuda_kernels(&kTable);
  }
  ~EmulatedKernels() { set_cuda_kernels(nullptr); }
};

}  // namespace attnpack::cuda
