#pragma once

#include <attnpack/core/quantized.h>
#include <attnpack/ops/cpu/isa/dot.h>

// Quantised keys and values, widened in registers while they are streamed.
namespace attnpack::ATTNPACK_ISA {

template <int Bits>
struct QuantizedRows {
  const unsigned char* first;
  int64_t stride;  // bytes
  const unsigned char* operator[](int64_t j) const { return first + j * stride; }
  QuantizedRows from(int64_t j) const { return {first + j * stride, stride}; }
};

constexpr int64_t kHalfBlock = kQuantizedBlock / 2;
constexpr int kBlockVectors = static_cast<int>(kQuantizedBlock / kLanes<float>);
constexpr int64_t kQuantizedAhead = 8 << 10;  // bytes
template <int Bits>
constexpr int64_t kBlockBytes = code_bytes(Bits, kQuantizedBlock);

inline float load_scale(const unsigned char* from) {
#if defined(ATTNPACK_HALF_INSTRUCTIONS)
  return half_at(from);
#else
  Float16 stored;
  __builtin_memcpy(&stored, from, sizeof(stored));
  return load_one(&stored);
#endif
}

// kLanes bytes as integers.
template <class Byte>
inline auto widen_bytes(const unsigned char* from) {
#if defined(ATTNPACK_HALF_INSTRUCTIONS)
  return widen(reinterpret_cast<const Byte*>(from));
#else
  typedef Byte Bytes __attribute__((vector_size(kLanes<float>)));
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  return __builtin_convertvector(load_bits<Bytes>(from), Integers);
#endif
}

// The integers of a whole block.
template <int Bits>
[[gnu::always_inline]] inline void widen_block(const unsigned char* codes, Vec<float> (&to)[kBlockVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < kBlockVectors; ++v) {
    constexpr int64_t kWidth = kLanes<float>;
    if constexpr (Bits == 8) {
      to[v] = __builtin_convertvector(widen_bytes<int8_t>(codes + v * kWidth), Vec<float>);
    } else {
      const auto both = widen_bytes<uint8_t>(codes + v * kWidth % kHalfBlock);
      const auto half = v * kWidth < kHalfBlock ? both & 15 : both >> 4;
      to[v] = __builtin_convertvector(half, Vec<float>) - 8.0f;
    }
  }
}

// The integers of a last block of `count` < kQuantizedBlock numbers; anything after them.
template <int Bits>
inline void widen_last_block(const unsigned char* codes, int64_t count, Vec<float> (&to)[kBlockVectors]) {
  unsigned char whole[kQuantizedBlock] = {};
  if constexpr (Bits == 8) {
    __builtin_memcpy(whole, codes, count);
  } else {
    const int64_t half = (count + 1) / 2;
    for (int64_t i = 0; i < count; ++i) {
      const int code = i < half ? codes[i] & 15 : codes[i - half] >> 4;
      whole[i % kHalfBlock] |= static_cast<unsigned char>(i < kHalfBlock ? code : code << 4);
    }
  }
  widen_block<Bits>(whole, to);
}

// The integers of block b of a row of dim numbers. Returns their scale.
template <int Bits>
[[gnu::always_inline]] inline float read_block(const unsigned char* row, int64_t dim, int64_t b,
                                               Vec<float> (&to)[kBlockVectors]) {
  const unsigned char* codes = row + b * kBlockBytes<Bits>;
  const float scale = load_scale(row + code_bytes(Bits, dim) + 2 * b);
  const int64_t left = dim - b * kQuantizedBlock;
  if (left >= kQuantizedBlock)
    widen_block<Bits>(codes, to);
  else
    widen_last_block<Bits>(codes, left, to);
  return scale;
}

// Prefetches the row that stands kQuantizedAhead bytes after this one.
[[gnu::always_inline]] inline void fetch_row(const unsigned char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) fetch_once(row + kQuantizedAhead + i);
}

// s[r, j] = x[r] . w[j] for `Rows` rows of x and `count` quantised rows of w. The rows of x are padded with zeros to
// whole blocks.
template <int Rows, int Bits>
void dot_products(const float* x, int64_t ldx, const QuantizedRows<Bits>& w, int64_t count, int64_t dim, float* s,
                  int64_t lds) {
  constexpr int kFolded = 4;
  constexpr int kAtOnce = Rows == 3 ? kFolded : kFolded * Rows;  // a power of two
  const int64_t blocks = quantized_blocks(dim), bytes = quantized_row_bytes(Bits, dim);
  for (int64_t j = 0; j < count; j += kFolded) {
    Vec<float> sum[Rows * kFolded];
    for (int i = 0; i < kFolded; ++i) {
      const unsigned char* row = w[j + i < count ? j + i : j];
      fetch_row(row, bytes);
      Vec<float> parts[Rows];
      for (auto& part : parts) part = broadcast(0.0f);
      for (int64_t b = 0; b < blocks; ++b) {
        Vec<float> numbers[kBlockVectors];
        const Vec<float> scale = broadcast(read_block<Bits>(row, dim, b, numbers));
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          const float* block = x + r * ldx + b * kQuantizedBlock;
          Vec<float> part = load<float>(block) * numbers[0];
#pragma GCC unroll 8
          for (int v = 1; v < kBlockVectors; ++v) part += load<float>(block + v * kLanes<float>) * numbers[v];
          parts[r] += part * scale;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sum[r * kFolded + i] = parts[r];
    }
    float total[Rows * kFolded];
    for (int i = 0; i < Rows * kFolded; i += kAtOnce) fold_each<float, kAtOnce>(sum + i, total + i, Add());
    for (int r = 0; r < Rows; ++r)
      for (int i = 0; i < kFolded && j + i < count; ++i) s[r * lds + j + i] = total[r * kFolded + i];
  }
}

// out[r] += sum over j of p[r, j] * v[j]. The rows of out have room for whole blocks. Skip leaves out excluded keys.
template <int Rows, bool Skip, int Bits>
void add_values(const float* p, int64_t ldp, const QuantizedRows<Bits>& values, int64_t count, int64_t dim, float* out,
                int64_t ldo) {
  constexpr int64_t kSummed = 64;  // short sums round less than one long sum
  const int64_t blocks = quantized_blocks(dim), bytes = quantized_row_bytes(Bits, dim);
  for (int64_t first = 0; first < count; first += kSummed) {
    const int64_t end = smaller(first + kSummed, count);
    for (int64_t b = 0; b < blocks; ++b) {
      // With few rows two keys in turn, because an addition waits for the one before it.
      constexpr int kTurns = Rows <= 2 ? 2 : 1;
      Vec<float> sums[kTurns][Rows][kBlockVectors];
      for (auto& sum : sums) clear(sum);
      const auto add = [&](int64_t j, Vec<float>(&sum)[Rows][kBlockVectors]) {
        const unsigned char* row = values[j];
        if (b == 0) fetch_row(row, bytes);
        Vec<float> numbers[kBlockVectors];
        const float scale = read_block<Bits>(row, dim, b, numbers);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          const float x = p[r * ldp + j];
          if (Skip && Product<float, float>::excluded(x)) continue;
          const float share = x * scale;
#pragma GCC unroll 8
          for (int v = 0; v < kBlockVectors; ++v) sum[r][v] += share * numbers[v];
        }
      };
      int64_t j = first;
      for (; j + kTurns <= end; j += kTurns)
#pragma GCC unroll 2
        for (int turn = 0; turn < kTurns; ++turn) add(j + turn, sums[turn]);
      if (j < end) add(j, sums[0]);
      auto& sum = sums[0];
      if constexpr (kTurns > 1)
        for (int r = 0; r < Rows; ++r)
          for (int v = 0; v < kBlockVectors; ++v) sum[r][v] += sums[1][r][v];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kBlockVectors; ++v) {
          float* to = out + r * ldo + b * kQuantizedBlock + v * kLanes<float>;
          store<float>(to, load<float>(to) + sum[r][v]);
        }
    }
  }
}

}  // namespace attnpack::ATTNPACK_ISA
