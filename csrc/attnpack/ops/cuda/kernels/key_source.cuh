#pragma once

#include <attnpack/core/quantized.h>
#include <attnpack/ops/cuda/kernels/plan.h>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// Where the keys and values of a step come from. A source has
// - Shared: its memory, of which the two tiles are [Keys, Width] numbers, swizzled;
// - load(begin, stage): starts to copy the keys and values [begin, begin + Keys) of a unit;
// - prepare(begin, stage): makes numbers of what has arrived, if it is something else;
// - key_tile(stage), value_tile(stage);
// - Number, number(p, u): reads single values again (add_broken in partial.cuh).
namespace attnpack::cuda {

// Row j of a kv head's keys or values. In pages: key j is row j % page_size of its page.
template <class S>
struct PlainRows {
  const S* base;
  int64_t stride, first;
  ATTNPACK_DEVICE const S* operator()(int64_t j) const { return base + (first + j) * stride; }
};
template <class S>
ATTNPACK_DEVICE PlainRows<S> plain_rows(const void* base, const Strides& s, const Unit& u) {
  return {static_cast<const S*>(base) + u.b * s.batch + u.kv_head * s.head, s.row, u.first_key};
}
template <class S>
struct PagedRows {
  const S* base;
  const int32_t* table;
  int64_t page_stride, stride;
  uint32_t page_size, last_page;
  // Nobody has read the table on the host. A page that is not there becomes the nearest one that is.
  ATTNPACK_DEVICE const S* operator()(int64_t j) const {
    const uint32_t key = static_cast<uint32_t>(j), entry = key / page_size;
    const int32_t named = table[entry];
    const uint32_t page = named < 0 ? 0 : static_cast<uint32_t>(named);
    return base + (page < last_page ? page : last_page) * page_stride + (key - entry * page_size) * stride;
  }
};
template <class S>
ATTNPACK_DEVICE PagedRows<S> paged_rows(const AttentionParams& p, const void* base, const Strides& s, const Unit& u) {
  return {static_cast<const S*>(base) + u.kv_head * s.head,
          p.block_table ? p.block_table + u.sequence * p.table_stride : nullptr,
          s.batch,
          s.row,
          static_cast<uint32_t>(p.page_size),
          static_cast<uint32_t>(p.num_pages - 1)};
}

// Rows in either place.
template <class S>
struct EitherRows {
  PlainRows<S> plain;
  PagedRows<S> paged;
  ATTNPACK_DEVICE const S* operator()(int64_t j) const { return paged.table ? paged(j) : plain(j); }
};

template <class Rows>
struct NumberOfRows {
  Rows rows;
  ATTNPACK_DEVICE float operator()(int64_t j, int c) const { return widen(rows(j)[c]); }
};

enum class KeysIn { kTensor, kPages, kEither, kBytes8, kBytes4 };

// Keys as numbers, in one tensor or in pages. kEither asks once for each step.
template <class S, int Keys, int Width, int Threads, int Stages, KeysIn From>
class NumberSource {
 public:
  struct Shared {
    S key[Stages][Keys * Width], value[Stages][Keys * Width];
  };

  ATTNPACK_DEVICE NumberSource(const AttentionParams& p, const Unit& u, Shared& shared)
      : p_(p), u_(u), shared_(shared) {}
  ATTNPACK_DEVICE void load(int64_t begin, int stage) {
    load_keys(begin, stage);
    load_values(begin, stage);
  }
  ATTNPACK_DEVICE void load_keys(int64_t begin, int stage) {
    copy(shared_.key[stage], p_.key, p_.key_strides, begin, p_.head_dim);
  }
  ATTNPACK_DEVICE void load_values(int64_t begin, int stage) {
    copy(shared_.value[stage], p_.value, p_.value_strides, begin, p_.v_head_dim);
  }
  ATTNPACK_DEVICE void prepare(int64_t, int) {}
  ATTNPACK_DEVICE S* key_tile(int stage) { return shared_.key[stage]; }
  ATTNPACK_DEVICE S* value_tile(int stage) { return shared_.value[stage]; }

  ATTNPACK_DEVICE static auto number(const AttentionParams& p, const Unit& u) {
    const auto plain = plain_rows<S>(p.value, p.value_strides, u);
    const auto paged = paged_rows<S>(p, p.value, p.value_strides, u);
    if constexpr (From == KeysIn::kTensor)
      return NumberOfRows<PlainRows<S>>{plain};
    else if constexpr (From == KeysIn::kPages)
      return NumberOfRows<PagedRows<S>>{paged};
    else
      return NumberOfRows<EitherRows<S>>{{plain, paged}};
  }

 private:
  ATTNPACK_DEVICE void copy(S* tile, const void* base, const Strides& s, int64_t begin, int64_t dim) {
    if (From == KeysIn::kPages || (From == KeysIn::kEither && p_.block_table))
      copy_from(paged_rows<S>(p_, base, s, u_), tile, base, begin, dim);
    else
      copy_from(plain_rows<S>(base, s, u_), tile, base, begin, dim);
  }
  template <class Rows>
  ATTNPACK_DEVICE void copy_from(const Rows& rows, S* tile, const void* base, int64_t begin, int64_t dim) {
    const int64_t left = u_.keys.end - begin;
    copy_tile<Keys, Width, Threads>(
        tile, [&](int r) { return rows(begin + r); }, static_cast<int>(left < Keys ? left : Keys),
        static_cast<int>(dim), static_cast<const S*>(base));
  }

  const AttentionParams& p_;
  const Unit& u_;
  Shared& shared_;
};

ATTNPACK_DEVICE float scale_of(const unsigned char* row, int64_t codes, int block) {
  return widen(*reinterpret_cast<const Float16*>(row + codes + 2 * block));
}

// One number of a quantised row of `dim` numbers (core/quantized.h), before any rotation back.
template <int Bits>
struct QuantizedNumber {
  PlainRows<unsigned char> rows;
  int dim;
  ATTNPACK_DEVICE float operator()(int64_t j, int c) const {
    const unsigned char* row = rows(j);
    const int block = c / static_cast<int>(kQuantizedBlock), first = block * static_cast<int>(kQuantizedBlock);
    const int count = dim - first < static_cast<int>(kQuantizedBlock) ? dim - first : static_cast<int>(kQuantizedBlock);
    const int half = (count + 1) / 2, i = c - first;
    int code;
    if constexpr (Bits == 8)
      code = static_cast<signed char>(row[c]);
    else
      code = (i < half ? row[first / 2 + i] & 15 : row[first / 2 + i - half] >> 4) - 8;
    return static_cast<float>(code) * scale_of(row, code_bytes(Bits, dim), block);
  }
};

// Quantised rows. They are copied as they are stored, one step ahead, and become numbers of the storage type in shared
// memory. So memory is read at 8.5 or 4.5 bits per number.
template <class S, int Keys, int Width, int Threads, int Bits>
class QuantizedSource {
 public:
  static constexpr int kRawBytes = (Keys * static_cast<int>(quantized_row_bytes(Bits, Width)) + 15) / 16 * 16 + 16;
  struct Shared {
    S key[Keys * Width], value[Keys * Width];
    alignas(16) unsigned char raw[2][2][kRawBytes];  // [stage], keys and values
  };

  ATTNPACK_DEVICE QuantizedSource(const AttentionParams& p, const Unit& u, Shared& shared)
      : p_(p), u_(u), shared_(shared) {}
  ATTNPACK_DEVICE void load(int64_t begin, int stage) {
    copy_rows(shared_.raw[stage][0], p_.key, p_.key_strides, begin, p_.head_dim);
    copy_rows(shared_.raw[stage][1], p_.value, p_.value_strides, begin, p_.v_head_dim);
  }
  ATTNPACK_DEVICE void prepare(int64_t begin, int stage) {
    widen_rows(shared_.key, shared_.raw[stage][0], p_.key, p_.key_strides, begin, p_.head_dim);
    widen_rows(shared_.value, shared_.raw[stage][1], p_.value, p_.value_strides, begin, p_.v_head_dim);
    sync_block();
  }
  ATTNPACK_DEVICE S* key_tile(int) { return shared_.key; }
  ATTNPACK_DEVICE S* value_tile(int) { return shared_.value; }

  ATTNPACK_DEVICE static QuantizedNumber<Bits> number(const AttentionParams& p, const Unit& u) {
    return {plain_rows<unsigned char>(p.value, p.value_strides, u), static_cast<int>(p.v_head_dim)};
  }

 private:
  static constexpr int kBlock = static_cast<int>(kQuantizedBlock);

  // The first byte of a step's rows, which need not lie at a multiple of 16, and their number.
  ATTNPACK_DEVICE const unsigned char* first_row(const void* base, const Strides& s, int64_t begin,
                                                 int64_t row_bytes) const {
    return static_cast<const unsigned char*>(base) + u_.b * s.batch + u_.kv_head * s.head + begin * row_bytes;
  }
  ATTNPACK_DEVICE int count(int64_t begin) const {
    const int64_t left = u_.keys.end - begin;
    return static_cast<int>(left < Keys ? left : Keys);
  }

  // Copies whole chunks of 16 bytes, from the chunk that holds the first byte on.
  ATTNPACK_DEVICE void copy_rows(unsigned char* raw, const void* base, const Strides& s, int64_t begin, int64_t dim) {
    const int64_t row_bytes = quantized_row_bytes(Bits, dim);
    const unsigned char* from = first_row(base, s, begin, row_bytes);
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    const int bytes = shift + count(begin) * static_cast<int>(row_bytes);
    for (int at = thread_id() * 16; at < bytes; at += Threads * 16)
      copy_async(raw + at, from - shift + at, bytes - at < 16 ? bytes - at : 16);
  }

  // Each thread makes 8 numbers, a chunk of the tile, from 8 or 4 bytes at once. Rows after the last one become zeros.
  ATTNPACK_DEVICE void widen_rows(S* tile, const unsigned char* raw, const void* base, const Strides& s, int64_t begin,
                                  int64_t dim) {
    constexpr int kChunks = Width / 8;
    const int row_bytes = static_cast<int>(quantized_row_bytes(Bits, dim)),
              codes = static_cast<int>(code_bytes(Bits, dim));
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(first_row(base, s, begin, row_bytes)) % 16);
    const int rows = count(begin);
    for (int n = thread_id(); n < Keys * kChunks; n += Threads) {
      const int r = n / kChunks, chunk = n % kChunks;
      uint32_t to[4] = {};
      if (r < rows && chunk * 8 < dim) {
        const unsigned char* row = raw + shift + r * row_bytes;
        const float scale = scale_of(row, codes, chunk * 8 / kBlock);
        float x[8];
        read_codes(row, chunk, static_cast<int>(dim), x);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = pack<S>(x[2 * i] * scale, x[2 * i + 1] * scale);
      }
      store_chunk(tile + swizzled_offset(r, chunk, Width), to);
    }
  }

  // Numbers [8 chunk, 8 chunk + 8) of a row, from whole words.
  ATTNPACK_DEVICE static void read_codes(const unsigned char* row, int chunk, int dim, float (&x)[8]) {
    if constexpr (Bits == 8) {
      const auto* words = reinterpret_cast<const uint32_t*>(row + 8 * chunk);
      const uint32_t low = words[0], high = words[1];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = static_cast<float>(static_cast<signed char>(low >> 8 * i));
        x[4 + i] = static_cast<float>(static_cast<signed char>(high >> 8 * i));
      }
    } else {
      // Byte i of a block holds number i in its lower half, and number i + half in its upper half.
      const int first = chunk * 8 / kBlock * kBlock, count = dim - first < kBlock ? dim - first : kBlock;
      const int half = count / 2, i = chunk * 8 - first;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int at = i + n < half ? i + n : i + n - half;
        const unsigned byte = row[first / 2 + at];
        x[n] = static_cast<float>(static_cast<int>(i + n < half ? byte & 15 : byte >> 4) - 8);
      }
    }
  }

  const AttentionParams& p_;
  const Unit& u_;
  Shared& shared_;
};

}  // namespace attnpack::cuda
