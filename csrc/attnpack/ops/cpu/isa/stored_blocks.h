#pragma once

#include <attnpack/core/stored.h>
#include <attnpack/ops/cpu/isa/byte_products.h>

// The blocks of stored weights: as numbers, and as codes of several rows side by side. In both, a number is
// scale * code + offset with a code that is not negative.
namespace attnpack::ATTNPACK_ISA {

template <class F>
decltype(auto) with_format(StoredFormat format, F&& f) {
  switch (format) {
#define ATTNPACK_CASE(name)   \
  case StoredFormat::k##name: \
    return f(std::integral_constant<StoredFormat, StoredFormat::k##name>());
    ATTNPACK_CASE(Q8_0)
    ATTNPACK_CASE(Q4_0)
    ATTNPACK_CASE(Q4_1)
    ATTNPACK_CASE(Q5_0)
    ATTNPACK_CASE(Q5_1)
    ATTNPACK_CASE(Q4_K)
    ATTNPACK_CASE(Q5_K)
#undef ATTNPACK_CASE
    default:
      return f(std::integral_constant<StoredFormat, StoredFormat::kQ6_K>());
  }
}

template <StoredFormat kFormat>
constexpr const StoredLayout& kLayout = kStoredLayouts[static_cast<int>(kFormat)];

inline float half_number(const uint8_t* p) {
  Float16 half;
  __builtin_memcpy(&half, p, 2);
  return load_one(&half);
}

// The scale and the offset of part i of a block of Q4_K or Q5_K, each 6 bits.
inline int packed_scale(const uint8_t* x, int i) { return i < 4 ? x[i] & 63 : (x[i + 4] & 15) | (x[i - 4] >> 2 & 48); }
inline int packed_offset(const uint8_t* x, int i) { return i < 4 ? x[i + 4] & 63 : x[i + 4] >> 4 | (x[i] >> 2 & 48); }

// The numbers of a block.
template <StoredFormat kFormat>
inline void read_block(const uint8_t* p, float* to) {
  using F = StoredFormat;
  constexpr bool kOffset = kFormat == F::kQ4_1 || kFormat == F::kQ5_1,
                 kFive = kFormat == F::kQ5_0 || kFormat == F::kQ5_1;
  if constexpr (kFormat == F::kQ8_0) {
    const float scale = half_number(p);
    for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(static_cast<int8_t>(p[2 + i]));
  } else if constexpr (kFormat == F::kQ6_K) {
    const float scale = half_number(p + 208);
    for (int i = 0; i < 256; ++i) {
      const int part = i / 128, of_part = i % 128, run = of_part / 32;
      const int low = p[part * 64 + of_part % 64] >> run / 2 * 4 & 15,
                high = p[128 + part * 32 + i % 32] >> 2 * run & 3;
      to[i] =
          scale * static_cast<float>(static_cast<int8_t>(p[192 + i / 16])) * static_cast<float>((low | high << 4) - 32);
    }
  } else if constexpr (kFormat == F::kQ4_K || kFormat == F::kQ5_K) {
    const float scale = half_number(p), offset = half_number(p + 2);
    const uint8_t *const high = p + 16, *const codes = kFormat == F::kQ5_K ? p + 48 : p + 16;
    for (int part = 0; part < 8; ++part) {
      const float part_scale = scale * static_cast<float>(packed_scale(p + 4, part)),
                  less = offset * static_cast<float>(packed_offset(p + 4, part));
      for (int i = 0; i < 32; ++i) {
        int code = codes[part / 2 * 32 + i] >> part % 2 * 4 & 15;
        if (kFormat == F::kQ5_K) code |= (high[i] >> part & 1) << 4;
        to[part * 32 + i] = part_scale * static_cast<float>(code) - less;
      }
    }
  } else {
    const float scale = half_number(p), offset = kOffset ? half_number(p + 2) : 0;
    const uint8_t* const codes = p + 2 + (kOffset ? 2 : 0) + (kFive ? 4 : 0);
    uint32_t high = 0;
    if (kFive) __builtin_memcpy(&high, codes - 4, 4);
    for (int i = 0; i < 32; ++i) {
      int code = codes[i % 16] >> i / 16 * 4 & 15;
      if (kFive) code |= (high >> i & 1) << 4;
      if (!kOffset) code -= kFive ? 16 : 8;
      to[i] = scale * static_cast<float>(code) + offset;
    }
  }
}

#if defined(ATTNPACK_BYTE_PRODUCTS)

// Whether codes are multiplied as signed numbers: 8 bits that the CPU cannot multiply as unsigned ones.
template <StoredFormat kFormat>
constexpr bool kSigned = kFormat == StoredFormat::kQ8_0 && !kWideCodes;
// Numbers that share a scale.
template <StoredFormat kFormat>
constexpr int kScaled = kFormat == StoredFormat::kQ6_K ? 16 : 32;

// Blocks that are unpacked in one go: of the small ones several, so that each load takes 16 bytes that are all needed.
template <StoredFormat kFormat>
constexpr int kTogether = kLayout<kFormat>.numbers == 32 ? 4 : 1;

// f(block, how many blocks) for the blocks 0 .. count - 1, of which kStep go together. Without kRest, count is a
// multiple of that.
template <StoredFormat kFormat, int kStep = kTogether<kFormat>, bool kRest = true, class F>
[[gnu::always_inline]] inline void for_blocks(int64_t count, F&& f) {
  int64_t block = 0;
  for (; block + kStep <= count; block += kStep) f(block, Index<kStep>());
  if constexpr (kRest && kStep > 1)
    for (; block < count; ++block) f(block, Index<1>());
}

constexpr int32_t kNibbles = 0x0f0f0f0f;

template <int Byte>
inline Floats unsigned_byte(Bytes x) {
  return to_floats(bits_of(shifted_right<8 * Byte>(x), 255));
}

// Bits 4 i to 4 i + 3 of each lane, as the bits 4 of its bytes.
template <int I>
inline Bytes fifth_bits(Bytes x) {
  return shifted_left<4>(bits_of(multiply(bits_of(shifted_right<4 * I>(x), 15), 0x00204081), 0x01010101));
}

// The same kBlocks blocks of several rows, `stride` bytes apart. to.put_codes(i, codes): four codes, 4 i to 4 i + 3, of
// each row. to.put_scale(i, scale, offset): those of the i-th kScaled numbers.
template <StoredFormat kFormat, int kBlocks, class To>
[[gnu::always_inline]] inline void unpack_blocks(const uint8_t* p, int64_t stride, To& to) {
  using F = StoredFormat;
  constexpr bool kOffset = kFormat == F::kQ4_1 || kFormat == F::kQ5_1,
                 kFive = kFormat == F::kQ5_0 || kFormat == F::kQ5_1;
  Bytes x[4];
  if constexpr (kFormat == F::kQ6_K) {
    const Floats scale = upper_halves(load_column(p + 206, stride));
    load_columns(p + 192, stride, x);
    unrolled<16>([&](auto i) ATTNPACK_INLINED {
      const Floats part_scale = scale * to_floats(signed_byte<i % 4>(x[i / 4]));
      to.put_scale(i, part_scale, part_scale * -32.0f);
    });
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {  // of the 64 bytes with lower bits: two runs of numbers each
        Bytes high[4];
        load_columns(p + part * 64 + quarter * 16, stride, x);
        load_columns(p + 128 + part * 32 + quarter % 2 * 16, stride, high);
        const int first = part * 32 + quarter * 4;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const Bytes upper = quarter < 2 ? high[i] : shifted_right<2>(high[i]);
          to.put_codes(first + i, either(bits_of(x[i], kNibbles), bits_of(shifted_left<4>(upper), 0x30303030)));
          to.put_codes(first + 16 + i, either(bits_of(shifted_right<4>(x[i]), kNibbles), bits_of(upper, 0x30303030)));
        }
      }
    }
  } else if constexpr (kFormat == F::kQ4_K || kFormat == F::kQ5_K) {
    load_columns(p, stride, x);
    const Floats scale = lower_halves(x[0]), offset = -upper_halves(x[0]);
    const Bytes scales[2] = {bits_of(x[1], 0x3f3f3f3f),
                             either(bits_of(x[3], kNibbles), bits_of(shifted_right<2>(x[1]), 0x30303030))};
    const Bytes offsets[2] = {bits_of(x[2], 0x3f3f3f3f), either(bits_of(shifted_right<4>(x[3]), kNibbles),
                                                                bits_of(shifted_right<2>(x[2]), 0x30303030))};
    unrolled<8>([&](auto i) ATTNPACK_INLINED {
      to.put_scale(i, scale * unsigned_byte<i % 4>(scales[i / 4]), offset * unsigned_byte<i % 4>(offsets[i / 4]));
    });
    Bytes high[8];
    if constexpr (kFormat == F::kQ5_K) {
      load_columns(p + 16, stride, x);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) high[i] = x[i];
      load_columns(p + 32, stride, x);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) high[4 + i] = x[i];
    }
    const uint8_t* const codes = kFormat == F::kQ5_K ? p + 48 : p + 16;
    unrolled<8>([&](auto piece) ATTNPACK_INLINED {  // 16 bytes: codes of two parts of the block
      constexpr int kPart = piece / 2 * 2, kHalf = piece % 2 * 4;
      load_columns(codes + 16 * piece, stride, x);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Bytes low = bits_of(x[i], kNibbles), up = bits_of(shifted_right<4>(x[i]), kNibbles);
        if constexpr (kFormat == F::kQ5_K) {
          low = either(low, bits_of(shifted_left<4>(shifted_right<kPart>(high[kHalf + i])), 0x10101010));
          up = either(up, bits_of(shifted_left<4>(shifted_right<kPart + 1>(high[kHalf + i])), 0x10101010));
        }
        to.put_codes(kPart * 8 + kHalf + i, low);
        to.put_codes(kPart * 8 + 8 + kHalf + i, up);
      }
    });
  } else {
    // A block is its scale (and offset), and words: its fifth bits and its codes.
    constexpr bool kEight = kFormat == F::kQ8_0;
    constexpr int kHead = kOffset ? 4 : 2, kBytes = kLayout<kFormat>.bytes, kWords = (kBytes - kHead) / 4;
    const auto put_scale = [&](int block, Floats scale, Floats offset) ATTNPACK_INLINED {
      to.put_scale(block, scale, kOffset ? offset : scale * (kEight ? -128.0f : kFive ? -16.0f : -8.0f));
    };
    Bytes high{};
    const auto put_word = [&](auto word, int block, Bytes w) ATTNPACK_INLINED {
      constexpr int kWord = word - kFive;
      if constexpr (kEight) {
        to.put_codes(8 * block + kWord, kSigned<kFormat> ? w : flipped(w, static_cast<int32_t>(0x80808080)));
      } else if constexpr (kWord < 0) {
        high = w;
      } else {
        Bytes low = bits_of(w, kNibbles), up = bits_of(shifted_right<4>(w), kNibbles);
        if constexpr (kFive) {
          low = either(low, fifth_bits<kWord>(high));
          up = either(up, fifth_bits<4 + kWord>(high));
        }
        to.put_codes(8 * block + kWord, low);
        to.put_codes(8 * block + 4 + kWord, up);
      }
    };
    if constexpr (kBlocks == 1) {
      const Bytes head = load_column(p, stride);
      put_scale(0, lower_halves(head), upper_halves(head));
      if constexpr (kFive) put_word(Index<0>(), 0, load_column(p + kHead, stride));
      unrolled<kWords - kFive>([&](auto i) ATTNPACK_INLINED {
        if constexpr (i % 4 == 0) load_columns(p + kBytes - 4 * (kWords - kFive - i), stride, x);
        put_word(Index<i + kFive>(), 0, x[i % 4]);
      });
    } else {
      // The words of memory, each loaded once. Where a scale takes half a word, every second block lies across words.
      constexpr int kAll = kBlocks * kBytes / 4, kPeriod = kOffset ? kBytes / 4 : kBytes / 2;
      Bytes before{};
      unrolled<kAll>([&](auto i) ATTNPACK_INLINED {
        constexpr int kLoad = i / 4 * 4 + 4 > kAll ? kAll - 4 : i / 4 * 4;  // the last load may overlap
        constexpr int kBlock = i / kPeriod * (kOffset ? 1 : 2), kAt = i % kPeriod;
        if constexpr (i % 4 == 0) load_columns(p + 4 * kLoad, stride, x);
        const Bytes w = x[i - kLoad];
        if constexpr (kAt == 0)
          put_scale(kBlock, lower_halves(w), kOffset ? upper_halves(w) : Floats{});
        else if constexpr (kOffset)
          put_word(Index<kAt - 1>(), kBlock, w);
        else if constexpr (kAt <= kWords)
          put_word(Index<kAt - 1>(), kBlock, joined_halves(before, w));
        else
          put_word(Index<kAt - kWords - 1>(), kBlock + 1, w);
        if constexpr (!kOffset && kAt == kWords) put_scale(kBlock + 1, upper_halves(w), Floats{});
        before = w;
      });
    }
  }
}

#endif

}  // namespace attnpack::ATTNPACK_ISA
