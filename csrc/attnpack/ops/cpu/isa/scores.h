#pragma once

#include <attnpack/core/dropout.h>
#include <attnpack/core/params.h>
#include <attnpack/ops/cpu/isa/math.h>

// Turns products q.k into the scores that the softmax sees, one row at a time: scale, softcap, ALiBi, mask. Excluded
// keys become -inf.
namespace attnpack::ATTNPACK_ISA {

// One row of a tile: its query, and the keys that its ranges leave.
struct QueryRow {
  int64_t head, query, position;
  Range keys;
};

inline QueryRow make_query_row(const AttentionParams& p, int64_t b, int64_t head, int64_t query) {
  return {head, query, query + (p.q_offsets ? p.q_offsets[b] : p.q_offset), key_range(p, b, query)};
}

inline bool allows_key(bool m) { return m; }
template <class S>
inline bool allows_key(S m) {
  return load_one(&m) != -kInfinity;
}
template <class T>
inline T mask_term(bool) {
  return 0;
}
template <class T, class S>
inline T mask_term(S m) {
  return static_cast<T>(load_one(&m));
}

// s += mask, or s = -inf where the mask excludes the key. mask: `count` elements, `stride` apart.
template <class T, class S>
inline void add_mask(const S* mask, int64_t stride, int64_t count, T* s) {
  if (stride == 1)
    for (int64_t j = 0; j < count; ++j) s[j] = allows_key(mask[j]) ? s[j] + mask_term<T>(mask[j]) : T(-kInfinity);
  else
    for (int64_t j = 0; j < count; ++j)
      s[j] = allows_key(mask[j * stride]) ? s[j] + mask_term<T>(mask[j * stride]) : T(-kInfinity);
}

template <class T>
inline void add_mask(const AttentionParams& p, int64_t offset, int64_t count, T* s) {
  const int64_t stride = p.mask_strides.column;
  switch (p.mask_dtype) {
    case DType::kFloat64:
      return add_mask(static_cast<const double*>(p.mask) + offset, stride, count, s);
    case DType::kFloat32:
      return add_mask(static_cast<const float*>(p.mask) + offset, stride, count, s);
    case DType::kBFloat16:
      return add_mask(static_cast<const BFloat16*>(p.mask) + offset, stride, count, s);
    case DType::kFloat16:
      return add_mask(static_cast<const Float16*>(p.mask) + offset, stride, count, s);
    case DType::kBool:
      return add_mask(static_cast<const bool*>(p.mask) + offset, stride, count, s);
  }
}

// Whether scores need a scale above 0 and nothing else. Then the exponential applies the scale at no cost.
inline bool only_scaled(const AttentionParams& p) {
  return p.softcap == 0 && !p.alibi_slopes && !p.mask && p.scale > 0;
}
template <class T>
inline T scale_left(const AttentionParams& p) {
  return only_scaled(p) ? static_cast<T>(p.scale) : T(1);
}

// Rewrites s, the products of the row with keys [begin, begin + count), as scores without the factor scale_left.
// cap_slope, if given, receives d(capped) / d(scaled) for the backward pass. s and cap_slope are padded to whole
// vectors.
template <class T>
inline void finish_scores(const AttentionParams& p, int64_t b, const QueryRow& row, int64_t begin, int64_t count, T* s,
                          T* cap_slope = nullptr) {
  const int64_t end = begin + count;
  const int64_t vectors = (count + kLanes<T> - 1) / kLanes<T>;
  const T scale = static_cast<T>(p.scale);
  if (p.softcap > 0) {
    const T into_cap = scale_into_cap<T>(p), cap = static_cast<T>(p.softcap);
    for (int64_t v = 0; v < vectors; ++v) {
      const Vec<T> t = tanh(load<T>(s + v * kLanes<T>) * into_cap);
      store<T>(s + v * kLanes<T>, cap * t);
      if (cap_slope) store<T>(cap_slope + v * kLanes<T>, T(1) - t * t);
    }
  } else if (!only_scaled(p)) {
    for (int64_t v = 0; v < vectors; ++v) store<T>(s + v * kLanes<T>, scale * load<T>(s + v * kLanes<T>));
  }
  if (p.alibi_slopes) {
    const T slope = static_cast<T>(p.alibi_slopes[row.head]);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t distance = row.position - begin - j;
      s[j] -= slope * static_cast<T>(distance < 0 ? -distance : distance);
    }
  }
  if (p.mask) {
    add_mask<T>(p,
                b * p.mask_strides.batch + row.head * p.mask_strides.head + row.query * p.mask_strides.row +
                    begin * p.mask_strides.column,
                count, s);
  }
  for (int64_t j = begin; j < end && j < row.keys.begin; ++j) s[j - begin] = -kInfinity;
  for (int64_t j = row.keys.end > begin ? row.keys.end : begin; j < end; ++j) s[j - begin] = -kInfinity;
  for (int64_t j = count; j < vectors * kLanes<T>; ++j) s[j] = -kInfinity;
}

inline bool dropped(const AttentionParams& p, int64_t b, const QueryRow& row, int64_t key) {
  return attnpack::dropped(p, b, row.head, row.query, key);
}

}  // namespace attnpack::ATTNPACK_ISA
