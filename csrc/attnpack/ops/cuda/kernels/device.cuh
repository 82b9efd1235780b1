#pragma once

#include <cstdint>

#include <attnpack/ops/cuda/kernels/numbers.cuh>

// The operations of a block of threads beyond plain arithmetic. Each has one name and two forms: PTX on the device, and
// in the host tests an emulated block (tests/cpp/support/cuda_emulator.h), which runs the kernels' own source.
#ifdef __CUDACC__

#define ATTNPACK_DEVICE __device__ __forceinline__
#define ATTNPACK_DEVICE_CALL __device__ __noinline__

namespace attnpack::cuda {

ATTNPACK_DEVICE int thread_id() { return static_cast<int>(threadIdx.x); }
ATTNPACK_DEVICE void sync_block() { __syncthreads(); }
// Lanes may have diverged at a condition. Loads of matrices and products need all lanes at once.
ATTNPACK_DEVICE void sync_warp() { __syncwarp(); }
ATTNPACK_DEVICE bool any_in_block(bool x) { return __syncthreads_or(x); }
template <class T>
ATTNPACK_DEVICE T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

// Bit i: lane i's x.
ATTNPACK_DEVICE uint32_t ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
ATTNPACK_DEVICE int count_bits(uint32_t x) { return __popc(x); }

// Copies 16 bytes from global to shared memory, bypassing the registers. It reads `bytes` of them, 0 to 16, and writes
// zeros for the rest.
ATTNPACK_DEVICE void copy_async(void* shared, const void* global, int bytes) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
ATTNPACK_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `Pending` of this thread's groups of copies are under way.
template <int Pending>
ATTNPACK_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit numbers. Lane 8 m + i names row i of matrix m (16 bytes). Afterwards to[m] holds
// row lane / 4, columns 2 (lane % 4) and the next. Transposed, it holds rows 2 (lane % 4) and the next, column lane /
// 4.
ATTNPACK_DEVICE void load_matrices(uint32_t (&to)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
ATTNPACK_DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// Stores two neighbours at once, and eight numbers of 16 bits: to shared memory, at multiples of their size.
ATTNPACK_DEVICE void store_pair(float* to, float first, float second) {
  *reinterpret_cast<float2*>(to) = make_float2(first, second);
}
ATTNPACK_DEVICE void store_chunk(void* to, const uint32_t (&x)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
}

// c [16, 8] += a [16, 16] b [16, 8], with fp32 sums. index.h maps fragments to elements.
template <class S>
ATTNPACK_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
ATTNPACK_DEVICE void multiply_add<BFloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
ATTNPACK_DEVICE void multiply_add<Float16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 1 / x, within one unit in the last place; 1 / inf is 0.
ATTNPACK_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^x, within two units in the last place; 2^-inf is 0.
ATTNPACK_DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attnpack::cuda

#elif !defined(ATTNPACK_EMULATED_DEVICE)
#error "include cuda_emulator.h first: outside nvcc only the host tests read the kernels"
#endif

namespace attnpack::cuda {

constexpr int kWarp = 32;

template <class T>
ATTNPACK_DEVICE T warp_max(T x) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = larger(x, shuffle_xor(x, mask));
  return x;
}
template <class T>
ATTNPACK_DEVICE T warp_sum(T x) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

}  // namespace attnpack::cuda
