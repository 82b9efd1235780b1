#pragma once

#include <attnpack/ops/cpu/isa/quantized_rows.h>

// Products with quantised keys and values as sums of integers (VPDPBUSD): four products of bytes per lane, exact. They
// serve queries of 16 bits. A query, or the weights of a block of values, are rounded to 16 bits of their largest
// number, and multiplied as two bytes each. Scales multiply whole sums, not numbers (PERFORMANCE.md).
namespace attnpack::ATTNPACK_ISA {

constexpr int64_t kIntegerRows = 8;   // most rows that share each load
constexpr int64_t kIntegerKeys = 64;  // keys that are multiplied together
constexpr int kMostCode = 32512;      // 127 * 256: the largest number of two signed bytes, whose lower one may be 128
constexpr int64_t kIntegerAhead = 8 << 10;

// Prefetching takes blocks of keys and blocks of values in turn, in the order in which they are read.
struct FarMemory {
  const unsigned char *next, *end, *other;
  int64_t block, other_block, left;
  FarMemory(const unsigned char* keys, int64_t key_bytes, const unsigned char* values, int64_t value_bytes)
      : next(keys), end(keys + key_bytes), other(values), block(key_bytes), other_block(value_bytes), left(0) {
    next += smaller(kIntegerAhead + kIntegerKeys * (key_bytes / kStreamedKeys), key_bytes);
  }
  // Prefetches as many bytes as are read meanwhile. Prefetches in bursts would stop the products that follow.
  [[gnu::always_inline]] inline void advance(int64_t bytes) {
#pragma GCC unroll 1
    for (left += bytes; left > 0; left -= kLine) {
      fetch_once(next);
      next += kLine;
      if (__builtin_expect(next >= end, 0)) swap_blocks();
    }
  }
  static constexpr int64_t kStreamedKeys = 256;  // keys of a block

 private:
  void swap_blocks() {
    const unsigned char* const begin = other;
    const int64_t beyond = next - end, bytes = other_block;
    other = end;
    other_block = block;
    block = bytes;
    next = begin + beyond;
    end = begin + bytes;
  }
};

struct IntegerScratch {
  signed char* query;  // [chunk][row] of the query
  float* query_scales;
  float* products;       // [row][unit], lane by lane
  uint64_t* words;       // [group][key]: the scales of a group's blocks, as stored
  unsigned char* codes;  // [chunk][unit]: the columns of values
  float* scales;         // [block][key]
  signed char* weights;  // [row][group][part][key / 4][block][key % 4]
  float* tops;           // [row][group]: the largest weights of four blocks, four times
  int32_t* offsets;      // [row][group]: what the values' offset adds to the sums
  unsigned char* rest;   // fewer than kIntegerKeys rows, with zeros after them
  IntegerScratch(const AttentionParams& p, Arena& arena) {
    const int64_t dim = larger(p.head_dim, p.v_head_dim), groups = (dim + 63) / 64, wide = (dim + 127) / 128 * 128;
    query = arena.take<signed char>(kIntegerRows * wide * 10);
    query_scales = arena.take<float>(kIntegerRows);
    products = arena.take<float>(kIntegerRows * kIntegerKeys * 4);
    words = arena.take<uint64_t>(groups * kIntegerKeys + 8);
    codes = arena.take<unsigned char>(kIntegerKeys * wide);
    scales = arena.take<float>(groups * 4 * kIntegerKeys);
    weights = arena.take<signed char>(kIntegerRows * groups * 8 * kIntegerKeys);
    tops = arena.take<float>(kIntegerRows * groups * 16);
    offsets = arena.take<int32_t>(kIntegerRows * groups * 16);
    rest = arena.take<unsigned char>(kIntegerKeys * quantized_row_bytes(8, dim) + kLine);
  }
};

#if !defined(__AVX512VNNI__)
constexpr bool kIntegerProducts = false;
template <int Bits, class F>
void with_layout(int64_t dim, F&& f);
#else
constexpr bool kIntegerProducts = true;

typedef __m512i Bytes;
typedef __m512 Floats;

// sum + the products of four unsigned and four signed bytes, lane by lane. As an instruction of its own, because GCC 12
// copies the sums of its builtin in every round of a loop.
inline Bytes byte_products(Bytes sum, Bytes unsigned_bytes, Bytes signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
  return sum;
}

// Rows are read in chunks of 64 bytes of integers, and keys in units of 4 * Pack. A chunk of a unit is four vectors,
// each of four lanes of 128 bits: with Pack 1 a lane holds 16 bytes of one key, with Pack 2 rows of at most 32 bytes
// are read two at a time. The four vectors are transposed, so that a lane of 32 bits belongs to one key (for scores) or
// to one column (for sums of values). The scales of `Group` blocks are read together.
template <int Bits, int Pack, int Group>
class IntegerLayout {
 public:
  explicit IntegerLayout(int64_t dim)
      : dim_(dim),
        bytes_(code_bytes(Bits, dim)),
        blocks_(quantized_blocks(dim)),
        groups_((blocks_ + Group - 1) / Group),
        chunks_(Pack == 2 ? 1 : (bytes_ + 63) / 64),
        whole_(Pack == 2 ? bytes_ / 32 : bytes_ / 64),
        last_(bytes_ % (64 / Pack) ? (1ull << bytes_ % (64 / Pack)) - 1 : ~0ull) {}

  int64_t row_bytes() const { return bytes_ + 2 * blocks_; }

  // Row r of the query as two signed bytes per number, in the order in which scores reads them; before them, what the
  // keys' offset adds to the sums.
  void pack_query(const float* x, int64_t r, int64_t rows, const IntegerScratch& w) const {
    const auto some = [&](int64_t i) {
      return static_cast<__mmask16>(dim_ - i >= 16 ? 0xffff : (1u << (dim_ - i)) - 1);
    };
    Floats largest{}, not_finite{};
    for (int64_t i = 0; i < dim_; i += 16) {
      const Floats v = _mm512_maskz_loadu_ps(some(i), x + i);
      largest = _mm512_max_ps(_mm512_abs_ps(v), largest);  // of a NaN and a number the number
      not_finite += v * 0.0f;
    }
    const float top = _mm512_reduce_max_ps(largest), finite = _mm512_reduce_add_ps(not_finite);
    const float factor = top > 0x1p-100f && finite == 0 ? kMostCode / top : 0.0f;
    w.query_scales[r] = top * (1.0f / kMostCode) + finite;
    signed char* const parts[2] = {reinterpret_cast<signed char*>(w.codes),  // upper and lower bytes, number by number
                                   reinterpret_cast<signed char*>(w.codes) + (dim_ + 15) / 16 * 16};
    for (int64_t i = 0; i < dim_; i += 16) {
      const Floats v = _mm512_maskz_loadu_ps(some(i), x + i);
      const Bytes code = factor == 0 ? Bytes{} : two_bytes(_mm512_cvtps_epi32(v * factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(parts[0] + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(code, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(parts[1] + i), _mm512_cvtepi32_epi8(code));
    }
    for (int64_t c = 0; c < chunks_; ++c) {
      signed char* const to = w.query + (c * rows + r) * kQueryBytes;
      for (int part = 0; part < 2; ++part) {
        Bytes sum{};
        for (int half = 0; half < kHalves; ++half) {
          Bytes lanes{};
#pragma GCC unroll 4
          for (int lane = 0; lane < 4; ++lane) {
            const Piece n = piece_at(c, lane, half);
            const __m128i piece =
                _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n.count) - 1), parts[part] + n.first);
            lanes = _mm512_mask_broadcast_i32x4(lanes, static_cast<__mmask16>(15 << 4 * lane), piece);
          }
          sum = byte_products(sum, _mm512_set1_epi8(1), lanes);
          signed char* const copies = to + 128 + half * 512 + part * 64;
          _mm512_store_si512(copies, _mm512_shuffle_epi32(lanes, _MM_PERM_AAAA));
          _mm512_store_si512(copies + 128, _mm512_shuffle_epi32(lanes, _MM_PERM_BBBB));
          _mm512_store_si512(copies + 256, _mm512_shuffle_epi32(lanes, _MM_PERM_CCCC));
          _mm512_store_si512(copies + 384, _mm512_shuffle_epi32(lanes, _MM_PERM_DDDD));
        }
        sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
        sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_CDAB));
        _mm512_store_si512(to + part * 64, _mm512_mullo_epi32(sum, _mm512_set1_epi32(-kOffset)));
      }
    }
  }

  // s[r, j] = query r . key j
  void scores(const QuantizedRows<Bits>& keys, int64_t count, int64_t rows, const IntegerScratch& w, FarMemory& memory,
              float* s, int64_t lds) const {
    FarMemory far = memory;  // in registers
    for (int64_t j = 0; j < count; j += kIntegerKeys) {
      const QuantizedRows<Bits> k = sixty_four(keys.from(j), count - j, w);
      if (j == 0 || k.first == w.rest) copy_scales(k, w.words);
      const int64_t share = fetched(k) * 2 * kKeys / chunks_;
      for (int64_t c = 0; c < chunks_; ++c) {
        const signed char* const query = w.query + c * rows * kQueryBytes;
        const uint64_t* const words = w.words + group_of(c) * kIntegerKeys;
        if (c < whole_)
          multiply_keys<true>(k, c, rows, query, words, w.products, far, share);
        else
          multiply_keys<false>(k, c, rows, query, words, w.products, far, share);
      }
      // The scales of the next keys are copied now, so that they have reached the cache when they are read.
      if (j + 2 * kIntegerKeys <= count) copy_scales(k.from(kIntegerKeys), w.words);
      const float* from = w.products;
      for (int64_t r = 0; r < rows; ++r) {
        const Floats scale = _mm512_set1_ps(w.query_scales[r]);
#pragma GCC unroll 2
        for (int64_t i = 0; i < kIntegerKeys; i += 16, from += 64 / Pack)
          _mm512_storeu_ps(s + r * lds + j + i, join_lanes(from) * scale);
      }
    }
    memory = far;
  }

  // sums[r] += sum over j of p[r, j] * v[j], in an order of columns that read_sums undoes. p has numbers for whole
  // groups of kIntegerKeys. Skip leaves out excluded keys.
  template <bool Skip>
  void add_values(float* p, int64_t ldp, const QuantizedRows<Bits>& values, int64_t count, int64_t rows,
                  const IntegerScratch& w, FarMemory& memory, float* sums, int64_t ld_sums) const {
    FarMemory far = memory;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = count; j % kIntegerKeys; ++j) p[r * ldp + j] = -0.0f;
    for (int64_t j = 0; j < count; j += kIntegerKeys, p += kIntegerKeys) {
      const QuantizedRows<Bits> v = sixty_four(values.from(j), count - j, w);
      if (j == 0 || v.first == w.rest) copy_scales(v, w.words);
      widen_scales(w);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t g = 0; g < groups_; ++g)
          find_top<Skip>(p + r * ldp, w.scales + g * Group * kIntegerKeys, w.tops + (r * groups_ + g) * 16);
      // Bytes are prefetched during the transposes and the products, about as long as each takes.
      const int64_t bytes = fetched(v) * kIntegerKeys / (chunks_ * kUnits), first = bytes / (1 + rows);
      for (int64_t c = 0; c < chunks_; ++c)
        if (c < whole_)
          transpose_values<true>(v, c, w.codes, far, first);
        else
          transpose_values<false>(v, c, w.codes, far, first);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t g = 0; g < groups_; ++g)
          round_weights<Skip>(p + r * ldp, w.scales + g * Group * kIntegerKeys, r * groups_ + g, w);
      if (j + 2 * kIntegerKeys <= count) copy_scales(v.from(kIntegerKeys), w.words);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < chunks_; ++c)
          multiply_values(w, r * groups_ + group_of(c), c, far, first, sums + r * ld_sums + c * kColumns);
    }
    memory = far;
  }

  void read_sums(const float* sums, float* to) const {
    for (int64_t c = 0; c < chunks_; ++c)
      for (int half = 0; half < kHalves; ++half)
        for (int lane = 0; lane < 4 / Pack; ++lane) {
          const Piece n = piece_at(c, lane, half);
          const float* const from = sums + c * kColumns + half * 64 + 4 * lane;
          for (int64_t i = 0; i < n.count; ++i) to[n.first + i] = from[i / 4 * 16 + i % 4];
        }
  }

 private:
  static constexpr int kHalves = Bits == 8 ? 1 : 2;  // numbers of a byte
  static constexpr int kKeys = 4 * Pack;             // of a unit
  static constexpr int kUnits = static_cast<int>(kIntegerKeys) / kKeys;
  static constexpr int kBlocks = Pack == 2 || Bits == 8 ? 2 : 4;  // blocks of a chunk
  static constexpr int kOffset = Bits == 8 ? 128 : 8;             // what is added to integers, so that none is negative
  static constexpr int kColumns = 4 * kHalves * 16;               // sums of a chunk
  static constexpr int kQueryBytes = 128 + kHalves * 512;         // of a row and chunk
  static constexpr bool kTwoChunks = Group > kBlocks;             // whether two chunks share a group
  static constexpr Bytes kSplit = {0x0e0c0a0806040200, 0x0f0d0b0907050301, 0x0e0c0a0806040200, 0x0f0d0b0907050301,
                                   0x0e0c0a0806040200, 0x0f0d0b0907050301, 0x0e0c0a0806040200, 0x0f0d0b0907050301};
  struct Four {
    Bytes a, b, c, d;
  };

  // For the 16 lanes of 32 bits, in chunks with even and odd numbers: the block of its group that a lane belongs to,
  // and where its scale and its weight stand.
  struct Places {
    alignas(64) int32_t block[2][16], weight[2][16];
    alignas(32) int16_t scale[2][16];
  };
  static constexpr Places kPlaces = [] {
    Places x{};
    for (int odd = 0; odd < 2; ++odd)
      for (int i = 0; i < 16; ++i) {
        const int lane = i / 4, other = Pack == 2 ? lane / 2 * 4 : 0;  // the second four keys of a unit
        x.block[odd][i] = (Pack == 2 ? lane % 2 : Bits == 8 ? lane / 2 : lane) + odd * (Bits == 8 ? 2 : 0);
        x.weight[odd][i] = x.block[odd][i] + other;
        x.scale[odd][i] = static_cast<int16_t>((i % 4 + other) * Group + x.block[odd][i]);
      }
    return x;
  }();
  static constexpr int64_t group_of(int64_t chunk) { return kTwoChunks ? chunk / 2 : chunk; }
  static constexpr int64_t is_odd(int64_t chunk) { return kTwoChunks ? chunk % 2 : 0; }

  // The numbers that half `half` of a lane's bytes holds: `count` of them, one per byte (quantize.cpp has the order).
  struct Piece {
    int64_t first, count;
  };
  Piece piece_at(int64_t chunk, int lane, int half) const {
    const int64_t at = Pack == 2 ? 16 * (lane % 2) : 64 * chunk + 16 * lane;
    if (at >= bytes_) return {0, 0};
    if (Bits == 8) return {at, smaller(16, dim_ - at)};
    const int64_t begin = at / kHalfBlock * kQuantizedBlock, count = smaller(kQuantizedBlock, dim_ - begin),
                  lower = (count + 1) / 2;
    return half ? Piece{begin + lower, count - lower} : Piece{begin, lower};
  }

  // Integers of 16 bits as two signed bytes: the lower byte is signed, so its upper bit is carried into the upper byte.
  static Bytes two_bytes(Bytes x) {
    return _mm512_xor_si512(_mm512_add_epi32(x, _mm512_set1_epi32(128)), _mm512_set1_epi32(128));
  }

  // At least 64 rows: the rows themselves, or a copy of them with zeros after it.
  QuantizedRows<Bits> sixty_four(const QuantizedRows<Bits>& rows, int64_t count, const IntegerScratch& w) const {
    if (count >= kIntegerKeys) return rows;
    const int64_t bytes = row_bytes();
    for (int64_t j = 0; j < count; ++j) __builtin_memcpy(w.rest + j * bytes, rows[j], bytes);
    __builtin_memset(w.rest + count * bytes, 0, (kIntegerKeys - count) * bytes);
    return {w.rest, bytes};
  }

  // Bytes per row that are prefetched. Rows that lie apart are left to the hardware.
  int64_t fetched(const QuantizedRows<Bits>& rows) const { return rows.stride < 2 * row_bytes() ? rows.stride : 0; }

  // to[group][key] = the scales of a group, as stored. Scalar copies cost less than gathers, and no vector unit.
  [[gnu::always_inline]] inline void copy_scales(const QuantizedRows<Bits>& rows, uint64_t* to) const {
    using Word = std::conditional_t<Group == 2, uint32_t, uint64_t>;
    for (int64_t g = 0; g < groups_; ++g, to += kIntegerKeys) {
      const unsigned char* from = rows.first + bytes_ + 2 * g * Group;
      auto* words = reinterpret_cast<unsigned char*>(to);
      const int64_t some = blocks_ - g * Group;
      if (some >= Group) {
#pragma GCC unroll 8
        for (int64_t j = 0; j < kIntegerKeys; ++j) {
          __builtin_memcpy(words + j * sizeof(Word), from + j * rows.stride, sizeof(Word));
          asm("" : : : "memory");
        }
      } else {
        for (int64_t j = 0; j < kIntegerKeys; ++j) {
          uint16_t word[4] = {};
          for (int64_t b = 0; b < some; ++b) __builtin_memcpy(word + b, from + j * rows.stride + 2 * b, 2);
          __builtin_memcpy(words + j * sizeof(Word), word, sizeof(Word));
        }
      }
    }
  }
  static const void* words_of(const uint64_t* words, int64_t key) {
    return reinterpret_cast<const unsigned char*>(words) + key * 2 * Group;
  }

  // Chunk c of the four (Pack 2: eight) rows of a unit.
  template <bool Whole>
  [[gnu::always_inline]] inline Bytes load_chunk(const unsigned char* row, int64_t stride, int64_t c) const {
    if constexpr (Pack == 2) {
      const auto load = [&](const unsigned char* from) {
        return Whole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                     : _mm256_maskz_loadu_epi8(static_cast<__mmask32>(last_), from);
      };
      return _mm512_inserti64x4(_mm512_castsi256_si512(load(row)), load(row + 4 * stride), 1);
    } else {
      return Whole ? _mm512_loadu_si512(row + 64 * c) : _mm512_maskz_loadu_epi8(last_, row + 64 * c);
    }
  }
  template <bool Whole>
  [[gnu::always_inline]] inline Four load_unit(const unsigned char* row, int64_t stride, int64_t c) const {
    Four x{load_chunk<Whole>(row, stride, c), load_chunk<Whole>(row + stride, stride, c),
           load_chunk<Whole>(row + 2 * stride, stride, c), load_chunk<Whole>(row + 3 * stride, stride, c)};
    // Without this GCC reads each row twice, as an operand in memory, and rows cross cache lines.
    asm("" : "+v"(x.a), "+v"(x.b), "+v"(x.c), "+v"(x.d));
    return x;
  }
  static Bytes without_sign(Bytes x) { return Bits == 8 ? _mm512_xor_si512(x, _mm512_set1_epi8(-128)) : x; }
  static Bytes low(Bytes x) { return Bits == 8 ? x : _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Bytes high(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

  // Vector i, lane by lane: bytes 4 i .. 4 i + 3 of each of four keys.
  [[gnu::always_inline]] static inline Four keys_in_lanes(Four x) {
    const Bytes a = _mm512_unpacklo_epi32(x.a, x.b), b = _mm512_unpackhi_epi32(x.a, x.b),
                c = _mm512_unpacklo_epi32(x.c, x.d), d = _mm512_unpackhi_epi32(x.c, x.d);
    return {without_sign(_mm512_unpacklo_epi64(a, c)), without_sign(_mm512_unpackhi_epi64(a, c)),
            without_sign(_mm512_unpacklo_epi64(b, d)), without_sign(_mm512_unpackhi_epi64(b, d))};
  }
  // Vector i, lane by lane: each of the bytes 4 i .. 4 i + 3, of four keys.
  [[gnu::always_inline]] static inline Four columns_in_lanes(Four x) {
    const Bytes a = _mm512_unpacklo_epi8(x.a, x.b), b = _mm512_unpackhi_epi8(x.a, x.b),
                c = _mm512_unpacklo_epi8(x.c, x.d), d = _mm512_unpackhi_epi8(x.c, x.d);
    return {without_sign(_mm512_unpacklo_epi16(a, c)), without_sign(_mm512_unpackhi_epi16(a, c)),
            without_sign(_mm512_unpacklo_epi16(b, d)), without_sign(_mm512_unpackhi_epi16(b, d))};
  }

  // products[row][unit] = or += the scaled products of 64 keys with chunk c.
  template <bool Whole>
  [[gnu::always_inline]] inline void multiply_keys(const QuantizedRows<Bits>& keys, int64_t c, int64_t rows,
                                                   const signed char* query, const uint64_t* words, float* products,
                                                   FarMemory& far, int64_t share) const {
    const int64_t stride = keys.stride;
    const unsigned char* row = keys.first;
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces.scale[is_odd(c)]));
    const auto scales = [&](int64_t key) __attribute__((always_inline)) {
      const __m256i stored = _mm256_loadu_si256(static_cast<const __m256i*>(words_of(words, key)));
      return _mm512_cvtph_ps(_mm256_permutexvar_epi16(order, stored));
    };
#pragma GCC unroll 1
    for (int u = 0; u < kUnits; u += 2, row += 2 * kKeys * stride, products += 32) {
      far.advance(share);
      const Four a = keys_in_lanes(load_unit<Whole>(row, stride, c)),
                 b = keys_in_lanes(load_unit<Whole>(row + kKeys * stride, stride, c));
      const Bytes left[2][4] = {{low(a.a), low(a.b), low(a.c), low(a.d)}, {high(a.a), high(a.b), high(a.c), high(a.d)}},
                  right[2][4] = {{low(b.a), low(b.b), low(b.c), low(b.d)},
                                 {high(b.a), high(b.b), high(b.c), high(b.d)}};
      const Floats left_scale = scales(u * kKeys), right_scale = scales((u + 1) * kKeys);
      const signed char* q = query;
      float* to = products;
#pragma GCC unroll 1
      for (int64_t r = 0; r < rows; ++r, q += kQueryBytes, to += kUnits * 16) {
        asm("" : "+r"(q));  // else GCC keeps the rows of all rounds in registers, and spills them
        Bytes upper[2], lower[2];
        upper[0] = upper[1] = _mm512_load_si512(q);
        lower[0] = lower[1] = _mm512_load_si512(q + 64);
#pragma GCC unroll 8
        for (int i = 0; i < 4 * kHalves; ++i) {
          const Bytes q1 = _mm512_load_si512(q + 128 + i * 128), q0 = _mm512_load_si512(q + 192 + i * 128);
          upper[0] = byte_products(upper[0], left[i / 4][i % 4], q1);
          upper[1] = byte_products(upper[1], right[i / 4][i % 4], q1);
          lower[0] = byte_products(lower[0], left[i / 4][i % 4], q0);
          lower[1] = byte_products(lower[1], right[i / 4][i % 4], q0);
        }
        const Floats x = joined(upper[0], lower[0]), y = joined(upper[1], lower[1]);
        _mm512_store_ps(to, c == 0 ? x * left_scale : x * left_scale + _mm512_load_ps(to));
        _mm512_store_ps(to + 16, c == 0 ? y * right_scale : y * right_scale + _mm512_load_ps(to + 16));
      }
    }
  }
  static Floats joined(Bytes upper, Bytes lower) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower));
  }

  // The sums over the lanes that belong to the same key, for 16 keys.
  [[gnu::always_inline]] static inline Floats join_lanes(const float* products) {
    const auto halves = [](Floats a, Floats b) {
      return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    const auto load = [&](int i) { return _mm512_load_ps(products + 16 * i); };
    if constexpr (Pack == 2)
      return halves(load(0), load(1));
    else
      return halves(halves(load(0), load(1)), halves(load(2), load(3)));
  }

  // scales[block][key], from words.
  void widen_scales(const IntegerScratch& w) const {
    for (int64_t g = 0; g < groups_; ++g)
#pragma GCC unroll 4
      for (int64_t j = 0; j < kIntegerKeys; j += 16) {
        const uint64_t* words = w.words + g * kIntegerKeys;
        float* to = w.scales + g * Group * kIntegerKeys + j;
        const Bytes x = _mm512_loadu_si512(words_of(words, j));
        if constexpr (Group == 2) {
          _mm512_store_ps(to, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)));
          _mm512_store_ps(to + kIntegerKeys, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16))));
        } else {
          const Bytes y = _mm512_loadu_si512(words_of(words, j + 8));
#pragma GCC unroll 4
          for (int b = 0; b < 4; ++b) {
            const __m128i few = _mm512_cvtepi64_epi16(_mm512_srli_epi64(x, 16 * b)),
                          more = _mm512_cvtepi64_epi16(_mm512_srli_epi64(y, 16 * b));
            _mm512_store_ps(to + b * kIntegerKeys,
                            _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(few), more, 1)));
          }
        }
      }
  }

  // p * scale of 16 keys. Excluded weights are -0.0.
  template <bool Skip>
  [[gnu::always_inline]] static inline Floats scaled(const float* p, const float* scales) {
    const Floats x = _mm512_loadu_ps(p), s = _mm512_load_ps(scales);
    return Skip ? _mm512_maskz_mul_ps(static_cast<__mmask16>(~_mm512_movepi32_mask(_mm512_castps_si512(x))), x, s)
                : x * s;
  }

  // [v0 v1 v2 v3] four times: each the fold of the 16 lanes of one vector.
  template <class Fold>
  [[gnu::always_inline]] static inline Bytes fold_four(const Bytes (&v)[4], Fold fold) {
    const Bytes a = fold(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1])),
                b = fold(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    Bytes x = fold(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    x = fold(x, _mm512_shuffle_i32x4(x, x, 0x4e));
    return fold(x, _mm512_shuffle_i32x4(x, x, 0xb1));
  }

  // The largest size of the weights of 64 keys, for each block of a group. As integers, so that NaN is the largest.
  template <bool Skip>
  void find_top(const float* p, const float* scales, float* to) const {
    Bytes top[4] = {};
#pragma GCC unroll 4
    for (int64_t j = 0; j < kIntegerKeys; j += 16)
#pragma GCC unroll 4
      for (int b = 0; b < Group; ++b)
        top[b] = _mm512_max_epi32(
            top[b], _mm512_and_si512(_mm512_castps_si512(scaled<Skip>(p + j, scales + b * kIntegerKeys + j)),
                                     _mm512_set1_epi32(0x7fffffff)));
    _mm512_store_ps(to, _mm512_castsi512_ps(fold_four(top, [](Bytes x, Bytes y) { return _mm512_max_epi32(x, y); })));
  }

  // The weights of 64 keys for a group, as two signed bytes each.
  template <bool Skip>
  void round_weights(const float* p, const float* scales, int64_t at, const IntegerScratch& w) const {
    const Floats top = _mm512_load_ps(w.tops + at * 16);
    const __mmask16 some = _mm512_cmp_ps_mask(top, _mm512_set1_ps(0x1p-100f), _CMP_NLT_UQ);
    const Floats factor = _mm512_maskz_div_ps(some, _mm512_set1_ps(kMostCode), top);
    const Floats factors[4] = {_mm512_permute_ps(factor, 0), _mm512_permute_ps(factor, 0x55),
                               _mm512_permute_ps(factor, 0xaa), _mm512_permute_ps(factor, 0xff)};
    signed char* to = w.weights + at * 8 * kIntegerKeys;
    Bytes sum[4] = {};
#pragma GCC unroll 4
    for (int64_t j = 0; j < kIntegerKeys; j += 16) {
      Bytes code[4] = {};
#pragma GCC unroll 4
      for (int b = 0; b < Group; ++b) {
        code[b] = _mm512_cvtps_epi32(scaled<Skip>(p + j, scales + b * kIntegerKeys + j) * factors[b]);
        sum[b] = _mm512_add_epi32(sum[b], code[b]);
        code[b] = two_bytes(code[b]);
      }
      const Bytes x = _mm512_shuffle_epi8(_mm512_packs_epi32(code[0], code[1]), kSplit),
                  y = Group == 2 ? Bytes{} : _mm512_shuffle_epi8(_mm512_packs_epi32(code[2], code[3]), kSplit);
      _mm512_store_si512(to + j * 4, _mm512_unpackhi_epi64(x, y));
      _mm512_store_si512(to + (kIntegerKeys + j) * 4, _mm512_unpacklo_epi64(x, y));
    }
    const Bytes sums = fold_four(sum, [](Bytes x, Bytes y) { return _mm512_add_epi32(x, y); });
    _mm512_store_si512(w.offsets + at * 16, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-kOffset)));
  }

  // The codes of chunk c of 64 values, columns in lanes.
  template <bool Whole>
  [[gnu::always_inline]] inline void transpose_values(const QuantizedRows<Bits>& values, int64_t c,
                                                      unsigned char* codes, FarMemory& far, int64_t share) const {
    const int64_t stride = values.stride;
    const unsigned char* row = values.first;
    unsigned char* to = codes + c * kUnits * kColumns * 4;
#pragma GCC unroll 1
    for (int u = 0; u < kUnits; ++u, row += kKeys * stride, to += kColumns * 4) {
      far.advance(share);
      const Four x = columns_in_lanes(load_unit<Whole>(row, stride, c));
      const Bytes v[4] = {x.a, x.b, x.c, x.d};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        _mm512_store_si512(to + i * 64, low(v[i]));
        if (kHalves == 2) _mm512_store_si512(to + 256 + i * 64, high(v[i]));
      }
    }
  }

  // sums[columns of chunk c] += the weights of 64 keys times their values.
  [[gnu::always_inline]] inline void multiply_values(const IntegerScratch& w, int64_t at, int64_t c, FarMemory& far,
                                                     int64_t share, float* sums) const {
    Bytes order[4 / Pack];
#pragma GCC unroll 4
    for (int u = 0; u < 4 / Pack; ++u)
      order[u] = _mm512_add_epi32(_mm512_load_si512(kPlaces.weight[is_odd(c)]), _mm512_set1_epi32(u * kKeys));
    Bytes upper[kColumns / 16], lower[kColumns / 16];
#pragma GCC unroll 8
    for (int i = 0; i < kColumns / 16; ++i) upper[i] = lower[i] = Bytes{};
    const signed char* weights = w.weights + at * 8 * kIntegerKeys;
    const unsigned char* codes = w.codes + c * kUnits * kColumns * 4;
#pragma GCC unroll 1
    for (int64_t j = 0; j < kIntegerKeys; j += 16, weights += 64) {
      const Bytes upper_16 = _mm512_load_si512(weights), lower_16 = _mm512_load_si512(weights + 4 * kIntegerKeys);
#pragma GCC unroll 4
      for (int u = 0; u < 4 / Pack; ++u, codes += kColumns * 4) {
        far.advance(share);
        const Bytes w1 = _mm512_permutexvar_epi32(order[u], upper_16),
                    w0 = _mm512_permutexvar_epi32(order[u], lower_16);
#pragma GCC unroll 8
        for (int i = 0; i < kColumns / 16; ++i) {
          const Bytes x = _mm512_load_si512(codes + i * 64);
          upper[i] = byte_products(upper[i], x, w1);
          lower[i] = byte_products(lower[i], x, w0);
        }
      }
    }
    const Bytes blocks = _mm512_load_si512(kPlaces.block[is_odd(c)]);
    const Bytes offset = _mm512_permutexvar_epi32(blocks, _mm512_load_si512(w.offsets + at * 16));
    const Floats step =
        _mm512_permutexvar_ps(blocks, _mm512_load_ps(w.tops + at * 16)) * _mm512_set1_ps(1.0f / kMostCode);
#pragma GCC unroll 8
    for (int i = 0; i < kColumns / 16; ++i) {
      Bytes sum = _mm512_add_epi32(_mm512_slli_epi32(upper[i], 8), lower[i]);
      if (Pack == 2) sum = _mm512_add_epi32(sum, _mm512_shuffle_i64x2(sum, sum, 0x4e));
      const Floats x = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, offset));
      _mm512_store_ps(sums + i * 16, x * step + _mm512_load_ps(sums + i * 16));
    }
  }

  const int64_t dim_, bytes_, blocks_, groups_, chunks_, whole_;
  const __mmask64 last_;
};

// Calls f with the layout of quantised rows of dim numbers.
template <int Bits, class F>
inline void with_layout(int64_t dim, F&& f) {
  constexpr int kPack = Bits == 8 ? 1 : 2;
  if (dim <= 64) return f(IntegerLayout<Bits, kPack, 2>(dim));
  return f(IntegerLayout<Bits, 1, 4>(dim));
}
#endif

}  // namespace attnpack::ATTNPACK_ISA
