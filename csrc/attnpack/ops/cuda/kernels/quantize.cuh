#pragma once

#include <attnpack/core/quantized.h>
#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/cuda/kernels/device.cuh>

// Quantised rows (core/quantized.h): numbers to bytes, and back. The integers and scales are those of the CPU
// (cpu/isa/quantize.cpp). One warp takes one row.
namespace attnpack::cuda {

constexpr int kQuantizeWarps = 4, kQuantizeThreads = kQuantizeWarps * kWarp;

struct QuantizeShared {
  float row[kQuantizeWarps][kMostQuantizedDim];
};

// x = H x / sqrt(size) for each group of `size` numbers, H the Hadamard matrix. It is its own inverse.
ATTNPACK_DEVICE void rotate_by_hadamard(float* x, int dim) {
  const int lane = thread_id() % kWarp, size = static_cast<int>(hadamard_size(dim));
  for (int half = 1; half < size; half *= 2) {
    for (int i = lane; i < dim / 2; i += kWarp) {
      float* a = x + i / half * 2 * half + i % half;
      const float low = a[0], high = a[half];
      a[0] = low + high;
      a[half] = low - high;
    }
    sync_warp();
  }
  const float factor = 1.0f / std::sqrt(static_cast<float>(size));
  for (int i = lane; i < dim; i += kWarp) x[i] *= factor;
  sync_warp();
}

// A block of up to 32 numbers, one per lane. Returns the lane's integer, and writes the scale. A number that is not
// finite makes the scale NaN.
ATTNPACK_DEVICE int quantize_lane(float x, bool there, int64_t bits, const float* block, unsigned char* scale) {
  const float size = there ? std::fabs(x) : 0.f, largest = warp_max(size);
  const uint32_t of_largest = ballot(there && size == largest), broken = ballot(there && !is_finite(x));
  int first = 0;
  while (of_largest && !(of_largest >> first & 1)) ++first;
  const float end = bits == 8 ? largest / 127.f : block[first] / -8.f;
  Float16 stored;
  narrow(broken ? float_of(0x7fc00000u) : end + 0.f, &stored);  // the sum turns -0 into 0
  if (thread_id() % kWarp == 0) {
    scale[0] = static_cast<unsigned char>(stored.bits & 0xff);
    scale[1] = static_cast<unsigned char>(stored.bits >> 8);
  }
  const float step = widen(stored), inverse = step == 0 ? 0.f : 1.f / step;
  const float least = bits == 8 ? -127.f : -8.f, most = bits == 8 ? 127.f : 7.f, code = nearbyintf(x * inverse);
  return static_cast<int>(code > most ? most : code > least ? code : least);
}

// Bytes from numbers.
template <class S>
ATTNPACK_DEVICE void quantize_row(const QuantizeParams& p, int64_t r, QuantizeShared& shared) {
  const int lane = thread_id() % kWarp, dim = static_cast<int>(p.dim);
  constexpr int kBlock = static_cast<int>(kQuantizedBlock);
  float* row = shared.row[thread_id() / kWarp];
  const S* from = static_cast<const S*>(p.from) + r * p.dim;
  auto* to = static_cast<unsigned char*>(p.to) + r * quantized_row_bytes(p.bits, p.dim);
  for (int i = lane; i < dim; i += kWarp) row[i] = static_cast<float>(widen(from[i]));
  sync_warp();
  if (p.bits == 4) rotate_by_hadamard(row, dim);
  unsigned char* scale = to + code_bytes(p.bits, p.dim);
  for (int begin = 0; begin < dim; begin += kBlock, scale += 2) {
    const int count = dim - begin < kBlock ? dim - begin : kBlock, half = (count + 1) / 2;
    const bool there = lane < count;
    const int code = quantize_lane(there ? row[begin + lane] : 0.f, there, p.bits, row + begin, scale);
    if (p.bits == 8) {
      if (there) to[begin + lane] = static_cast<unsigned char>(static_cast<signed char>(code));
      continue;
    }
    sync_warp();  // all lanes have read the block: the integers take its place
    if (there) row[begin + lane] = static_cast<float>(code + 8);
    sync_warp();
    if (lane < half) {
      const int low = static_cast<int>(row[begin + lane]);
      const int high = static_cast<int>(row[begin + (lane + half < count ? lane + half : lane)]);
      to[begin / 2 + lane] = static_cast<unsigned char>(low | high << 4);
    }
  }
}

// Numbers from bytes.
template <class S>
ATTNPACK_DEVICE void dequantize_row(const QuantizeParams& p, int64_t r, QuantizeShared& shared) {
  const int lane = thread_id() % kWarp, dim = static_cast<int>(p.dim);
  constexpr int kBlock = static_cast<int>(kQuantizedBlock);
  float* row = shared.row[thread_id() / kWarp];
  const auto* from = static_cast<const unsigned char*>(p.from) + r * quantized_row_bytes(p.bits, p.dim);
  const unsigned char* scales = from + code_bytes(p.bits, p.dim);
  for (int begin = 0; begin < dim; begin += kBlock) {
    const int count = dim - begin < kBlock ? dim - begin : kBlock, half = (count + 1) / 2;
    const Float16 step{static_cast<uint16_t>(scales[begin / kBlock * 2] | scales[begin / kBlock * 2 + 1] << 8)};
    if (lane >= count) continue;
    int code;
    if (p.bits == 8)
      code = static_cast<signed char>(from[begin + lane]);
    else
      code = (lane < half ? from[begin / 2 + lane] & 15 : from[begin / 2 + lane - half] >> 4) - 8;
    row[begin + lane] = static_cast<float>(code) * widen(step);
  }
  sync_warp();
  if (p.bits == 4) rotate_by_hadamard(row, dim);
  for (int i = lane; i < dim; i += kWarp)
    narrow(static_cast<typename Accumulation<S>::type>(row[i]), static_cast<S*>(p.to) + r * p.dim + i);
}

// Numbers rotated as rows of 4 bits are.
template <class S>
ATTNPACK_DEVICE void rotate_one(const QuantizeParams& p, int64_t r, QuantizeShared& shared) {
  const int lane = thread_id() % kWarp, dim = static_cast<int>(p.dim);
  float* row = shared.row[thread_id() / kWarp];
  for (int i = lane; i < dim; i += kWarp)
    row[i] = static_cast<float>(widen(static_cast<const S*>(p.from)[r * p.dim + i]));
  sync_warp();
  rotate_by_hadamard(row, dim);
  for (int i = lane; i < dim; i += kWarp)
    narrow(static_cast<typename Accumulation<S>::type>(row[i]), static_cast<S*>(p.to) + r * p.dim + i);
}

template <class S>
ATTNPACK_DEVICE void quantize_block(const QuantizeParams& p, RowsTo to, int64_t rows, int64_t block,
                                    QuantizeShared& shared) {
  const int64_t r = block * kQuantizeWarps + thread_id() / kWarp;
  if (r >= rows) return;
  if (to == RowsTo::kBytes)
    quantize_row<S>(p, r, shared);
  else if (to == RowsTo::kNumbers)
    dequantize_row<S>(p, r, shared);
  else
    rotate_one<S>(p, r, shared);
}

}  // namespace attnpack::cuda
