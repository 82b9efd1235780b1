#pragma once

#include <cstdint>

#include <attnpack/ops/cuda/kernels/device.cuh>

// The operations of Hopper (sm_90a): products of a warpgroup (four warps) with operands in shared memory, copies of
// boxes of a tensor, and barriers that count their bytes. As in device.cuh, each has one name and two forms.
namespace attnpack::cuda {

constexpr int kWarpgroup = 128;
// A tile in shared memory is cut into panels of 64 columns, one after the other. The rows of a panel have 128 bytes,
// and are swizzled as in index.h. A panel begins at a multiple of 1,024 bytes.
constexpr int kPanel = 64;

}  // namespace attnpack::cuda

#ifdef __CUDACC__

#include <cuda.h>

namespace attnpack::cuda {

// Describes a tensor [batch, head, row, column] for copies of boxes.
using TileMap = CUtensorMap;

ATTNPACK_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Barriers in shared memory. A phase ends when all `arrivals` have come, and all bytes that they expect. Whoever waits
// names the parity of the phase.
struct Barrier {
  uint64_t bits;
};
ATTNPACK_DEVICE void set_up(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
// Makes barriers known to the copies. A barrier of the block has to follow.
ATTNPACK_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
ATTNPACK_DEVICE void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
ATTNPACK_DEVICE void arrive_expecting(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}
ATTNPACK_DEVICE void wait(Barrier& barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// Copies the box of kPanel columns and `rows` rows (that of the map) to a panel. Columns and rows past the tensor
// become zeros.
ATTNPACK_DEVICE void copy_box(void* panel, const TileMap& map, Barrier& barrier, int column, int row, int head,
                              int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(panel)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Afterwards, and after the next barrier, products and copies of boxes see this thread's stores to shared memory.
ATTNPACK_DEVICE void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers of some warps of a block, by number. 0 is that of sync_block. Not `bar`, whose full name is barrier.aligned:
// that promises that all threads execute one and the same instruction, and warps of different roles do not.
ATTNPACK_DEVICE void sync_threads(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
ATTNPACK_DEVICE void arrive_threads(int number, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// All warps of a warpgroup pass registers on, or take them.
template <int Registers>
ATTNPACK_DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
ATTNPACK_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// An operand of a product: a tile of panels, from some place on. The bits are those of the matrix descriptor (PTX ISA,
// "Asynchronous warpgroup level matrix shared memory layout"): address, step of panels, step of 8 rows, 128-byte
// swizzle.
struct SharedMatrix {
  uint64_t bits;
  ATTNPACK_DEVICE SharedMatrix further(int bytes) const { return {bits + (bytes >> 4)}; }
};
ATTNPACK_DEVICE SharedMatrix shared_matrix(const void* tile, int panel_bytes) {
  constexpr uint64_t kEightRows = 8 * kPanel * 2 >> 4, kSwizzle = 1;
  return {static_cast<uint64_t>(shared_address(tile) >> 4) | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
          kEightRows << 32 | kSwizzle << 62};
}
// The compiler must not compute operands further on from this one ahead of this place.
ATTNPACK_DEVICE void hold(SharedMatrix& m) { asm volatile("" : "+l"(m.bits)); }

// Products run beside what follows. fence_products comes before the first one and after other writes to its registers.
ATTNPACK_DEVICE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ATTNPACK_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Pending` groups of products are under way.
template <int Pending>
ATTNPACK_DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// The compiler must not move these registers across this place.
template <int Blocks>
ATTNPACK_DEVICE void hold(float (&c)[Blocks][4]) {
#pragma unroll
  for (int j = 0; j < Blocks; ++j)
    asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}
template <int Blocks>
ATTNPACK_DEVICE void hold(uint32_t (&a)[Blocks][4]) {
#pragma unroll
  for (int j = 0; j < Blocks; ++j)
    asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
}

// The registers of sums of 32, 64, 128, 192 and 256 columns, in PTX and as operands.
#define ATTNPACK_SUMS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTNPACK_SUMS_64                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTNPACK_SUMS_128                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define ATTNPACK_SUMS_192                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTNPACK_SUMS_256                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "     \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "     \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ATTNPACK_BLOCK(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define ATTNPACK_BLOCKS_4(j) ATTNPACK_BLOCK(j), ATTNPACK_BLOCK(j + 1), ATTNPACK_BLOCK(j + 2), ATTNPACK_BLOCK(j + 3)
#define ATTNPACK_BLOCKS_32 ATTNPACK_BLOCKS_4(0)
#define ATTNPACK_BLOCKS_64 ATTNPACK_BLOCKS_32, ATTNPACK_BLOCKS_4(4)
#define ATTNPACK_BLOCKS_128 ATTNPACK_BLOCKS_64, ATTNPACK_BLOCKS_4(8), ATTNPACK_BLOCKS_4(12)
#define ATTNPACK_BLOCKS_192 ATTNPACK_BLOCKS_128, ATTNPACK_BLOCKS_4(16), ATTNPACK_BLOCKS_4(20)
#define ATTNPACK_BLOCKS_256 ATTNPACK_BLOCKS_192, ATTNPACK_BLOCKS_4(24), ATTNPACK_BLOCKS_4(28)

// One instruction of k = 16, by type, columns, and numbers of the operands after the sums. `from` of 64 rows is in
// shared memory, or in registers; then the columns of the other operand are the contiguous ones.
#define ATTNPACK_WGMMA(type, n, a, b, add)                                                                      \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
  " {" ATTNPACK_SUMS_##n "}, " a ", " b ", p, 1, 1"

template <class S, int Columns>
struct WarpgroupProduct;
#define ATTNPACK_WARPGROUP_PRODUCT(S, type, n, o0, o1, o2, o3, o4, o5)                                           \
  template <>                                                                                                    \
  struct WarpgroupProduct<S, n> {                                                                                \
    ATTNPACK_DEVICE static void rows(float (&c)[n / 8][4], SharedMatrix a, SharedMatrix b, int add) {            \
      asm volatile(ATTNPACK_WGMMA(type, n, o0, o1, o2) ", 0, 0;\n}"                                              \
                   : ATTNPACK_BLOCKS_##n                                                                         \
                   : "l"(a.bits), "l"(b.bits), "r"(add));                                                        \
    }                                                                                                            \
    ATTNPACK_DEVICE static void columns(float (&c)[n / 8][4], SharedMatrix a, SharedMatrix b, int add) {         \
      asm volatile(ATTNPACK_WGMMA(type, n, o0, o1, o2) ", 0, 1;\n}"                                              \
                   : ATTNPACK_BLOCKS_##n                                                                         \
                   : "l"(a.bits), "l"(b.bits), "r"(add));                                                        \
    }                                                                                                            \
    ATTNPACK_DEVICE static void columns(float (&c)[n / 8][4], const uint32_t (&a)[4], SharedMatrix b, int add) { \
      asm volatile(ATTNPACK_WGMMA(type, n, "{" o0 ", " o1 ", " o2 ", " o3 "}", o4, o5) ", 1;\n}"                 \
                   : ATTNPACK_BLOCKS_##n                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(add));                         \
    }                                                                                                            \
  };
#define ATTNPACK_WARPGROUP_PRODUCTS(S, type)                                           \
  ATTNPACK_WARPGROUP_PRODUCT(S, type, 32, "%16", "%17", "%18", "%19", "%20", "%21")    \
  ATTNPACK_WARPGROUP_PRODUCT(S, type, 64, "%32", "%33", "%34", "%35", "%36", "%37")    \
  ATTNPACK_WARPGROUP_PRODUCT(S, type, 128, "%64", "%65", "%66", "%67", "%68", "%69")   \
  ATTNPACK_WARPGROUP_PRODUCT(S, type, 192, "%96", "%97", "%98", "%99", "%100", "%101") \
  ATTNPACK_WARPGROUP_PRODUCT(S, type, 256, "%128", "%129", "%130", "%131", "%132", "%133")
ATTNPACK_WARPGROUP_PRODUCTS(BFloat16, "bf16")
ATTNPACK_WARPGROUP_PRODUCTS(Float16, "f16")

// c [64, 8 Blocks] = a [64, 16] b [8 Blocks, 16]^T, or c += that. Both operands are rows of 16 numbers in panels.
template <class S, int Blocks>
ATTNPACK_DEVICE void multiply_rows(float (&c)[Blocks][4], SharedMatrix a, SharedMatrix b, bool add) {
  WarpgroupProduct<S, 8 * Blocks>::rows(c, a, b, add);
}
// c [64, 8 Blocks] += a [64, 16] b [16, 8 Blocks]. Each warp has 16 rows of a and c, as fragments of mma.m16n8k16.
template <class S, int Blocks>
ATTNPACK_DEVICE void multiply_columns(float (&c)[Blocks][4], const uint32_t (&a)[4], SharedMatrix b) {
  WarpgroupProduct<S, 8 * Blocks>::columns(c, a, b, 1);
}
// As multiply_columns, with a in panels.
template <class S, int Blocks>
ATTNPACK_DEVICE void multiply_shared_columns(float (&c)[Blocks][4], SharedMatrix a, SharedMatrix b) {
  WarpgroupProduct<S, 8 * Blocks>::columns(c, a, b, 1);
}

}  // namespace attnpack::cuda

#elif !defined(ATTNPACK_EMULATED_DEVICE)
#error "include cuda_emulator.h first: outside nvcc only the host tests read the kernels"
#endif
