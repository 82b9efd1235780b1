#include <attnpack/ops/cpu/isa/quantized_rows.h>

// Quantised rows. With 8 bits an integer is in [-127, 127], and the scale is the block's largest size / 127. With 4
// bits an integer is in [-8, 7] and stored plus 8. The scale maps the number of the largest size to -8, so that all 16
// integers are used; such rows are rotated first (QuaRot, Ashkboos et al. 2024, section 4): no number then stands out.
namespace attnpack::ATTNPACK_ISA {
namespace {

// x = H x / sqrt(size) for each group of `size` numbers, H the Hadamard matrix. It is its own inverse.
void rotate_row(float* x, int64_t dim) {
  const int64_t size = hadamard_size(dim);
  for (int64_t half = 1; half < size; half *= 2)
    for (int64_t begin = 0; begin < dim; begin += 2 * half)
      for (int64_t i = begin; i < begin + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  const float factor = 1.0f / static_cast<float>(__builtin_sqrt(static_cast<double>(size)));
  for (int64_t i = 0; i < dim; ++i) x[i] *= factor;
}

// The nearest integer, ties to even, for numbers below 2^22.
inline float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }

// The scale as it is stored. A block that holds a number that is not finite gets NaN.
inline float store_scale(float scale, float finite, unsigned char* to) {
  Float16 stored;
  store_one(&stored, scale + (finite - finite));
  __builtin_memcpy(to, &stored, sizeof(stored));
  return load_one(&stored);
}

// Integers in [least, -least - 1] for `count` numbers. `end` is the number that stands at the end of the range.
inline void quantize_block(const float* x, int64_t count, float end, float most, float least, unsigned char* scale,
                           float* codes) {
  float sum = 0;  // of zeros, but for numbers that are not finite
  for (int64_t i = 0; i < count; ++i) sum += x[i] * 0.0f;
  const float step = store_scale(end, sum, scale), inverse = step == 0 ? 0.0f : 1.0f / step;
  for (int64_t i = 0; i < count; ++i) {
    const float code = rounded(x[i] * inverse);
    codes[i] = code > most ? most : code > least ? code : least;
  }
}

void quantize_row_8(const float* x, int64_t dim, unsigned char* to) {
  unsigned char* scale = to + code_bytes(8, dim);
  for (int64_t begin = 0; begin < dim; begin += kQuantizedBlock, scale += 2) {
    const int64_t count = smaller(kQuantizedBlock, dim - begin);
    float largest = 0, codes[kQuantizedBlock];
    for (int64_t i = begin; i < begin + count; ++i) {
      const float size = x[i] < 0 ? -x[i] : x[i];
      largest = size > largest ? size : largest;
    }
    quantize_block(x + begin, count, largest / 127.0f, 127.0f, -127.0f, scale, codes);
    for (int64_t i = 0; i < count; ++i) to[begin + i] = static_cast<unsigned char>(static_cast<int8_t>(codes[i]));
  }
}

// Byte i of a block holds number i in its lower half, and number i + half in its upper half.
void quantize_row_4(const float* x, int64_t dim, unsigned char* to) {
  unsigned char* scale = to + code_bytes(4, dim);
  for (int64_t begin = 0; begin < dim; begin += kQuantizedBlock, scale += 2, to += kQuantizedBlock / 2) {
    const int64_t count = smaller(kQuantizedBlock, dim - begin), half = (count + 1) / 2;
    float largest = 0, codes[kQuantizedBlock] = {};
    for (int64_t i = begin; i < begin + count; ++i)
      largest = (x[i] < 0 ? -x[i] : x[i]) > (largest < 0 ? -largest : largest) ? x[i] : largest;
    quantize_block(x + begin, count, largest / -8.0f, 7.0f, -8.0f, scale, codes);
    for (int64_t i = 0; i < half; ++i) {
      const int low = static_cast<int>(codes[i]) + 8,
                high = static_cast<int>(codes[i + half < count ? i + half : i]) + 8;
      to[i] = static_cast<unsigned char>(low | high << 4);
    }
  }
}

void dequantize_row_8(const unsigned char* from, int64_t dim, float* x) {
  const unsigned char* scale = from + code_bytes(8, dim);
  for (int64_t begin = 0; begin < dim; begin += kQuantizedBlock, scale += 2) {
    const int64_t end = smaller(begin + kQuantizedBlock, dim);
    const float step = load_scale(scale);
    for (int64_t i = begin; i < end; ++i) x[i] = static_cast<float>(static_cast<int8_t>(from[i])) * step;
  }
}

void dequantize_row_4(const unsigned char* from, int64_t dim, float* x) {
  const unsigned char* scale = from + code_bytes(4, dim);
  for (int64_t begin = 0; begin < dim; begin += kQuantizedBlock, scale += 2, from += kQuantizedBlock / 2) {
    const int64_t count = smaller(kQuantizedBlock, dim - begin), half = (count + 1) / 2;
    const float step = load_scale(scale);
    for (int64_t i = 0; i < half; ++i) x[begin + i] = static_cast<float>(from[i] % 16 - 8) * step;
    for (int64_t i = half; i < count; ++i) x[begin + i] = static_cast<float>(from[i - half] / 16 - 8) * step;
  }
}

}  // namespace

void quantize_rows(const QuantizeParams& p, Range rows, void* scratch) {
  float* x = static_cast<float*>(scratch);
  dispatch_pairs(p.dtype, [&](auto storage, auto) {
    using S = decltype(storage);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const S* from = static_cast<const S*>(p.from) + r * p.dim;
      for (int64_t i = 0; i < p.dim; ++i) x[i] = static_cast<float>(load_one(from + i));
      unsigned char* to = static_cast<unsigned char*>(p.to) + r * quantized_row_bytes(p.bits, p.dim);
      if (p.bits == 8) {
        quantize_row_8(x, p.dim, to);
      } else {
        rotate_row(x, p.dim);
        quantize_row_4(x, p.dim, to);
      }
    }
  });
}

void rotate_rows(const QuantizeParams& p, Range rows) {
  for (int64_t r = rows.begin; r < rows.end; ++r) rotate_row(static_cast<float*>(p.to) + r * p.dim, p.dim);
}

void dequantize_rows(const QuantizeParams& p, Range rows, void* scratch) {
  float* x = static_cast<float*>(scratch);
  dispatch_pairs(p.dtype, [&](auto storage, auto) {
    using S = decltype(storage);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const unsigned char* from = static_cast<const unsigned char*>(p.from) + r * quantized_row_bytes(p.bits, p.dim);
      if (p.bits == 8) {
        dequantize_row_8(from, p.dim, x);
      } else {
        dequantize_row_4(from, p.dim, x);
        rotate_row(x, p.dim);
      }
      S* to = static_cast<S*>(p.to) + r * p.dim;
      for (int64_t i = 0; i < p.dim; ++i) store_one(to + i, x[i]);
    }
  });
}

}  // namespace attnpack::ATTNPACK_ISA
