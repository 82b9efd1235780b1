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

// allowed: the keys that a shared mask leaves (SharedMask).
inline QueryRow make_query_row(const AttentionParams& p, int64_t b, int64_t head, int64_t query, Range allowed) {
  Range keys = key_range(p, b, query);
  if (keys.begin < allowed.begin) keys.begin = allowed.begin;
  if (keys.end > allowed.end) keys.end = allowed.end;
  if (keys.end < keys.begin) keys.end = keys.begin;
  return {head, query, query + (p.q_offsets ? p.q_offsets[b] : p.q_offset), keys};
}

inline bool allows_key(bool m) { return m; }
template <class S>
inline bool allows_key(S m) {
  return load_one(&m) != -kInfinity;
}
template <class T, class S>
inline T mask_term(S m) {
  return static_cast<T>(load_one(&m));
}

// Whether a mask's element allows the key and adds nothing.
inline bool is_plain(bool m) { return m; }
template <class S>
inline bool is_plain(S m) {
  return load_one(&m) == 0;
}

// Calls f with the elements of a mask's row for keys [begin, begin + count) and their stride. Those of named keys are
// put next to each other first, in pieces.
template <class M, class F>
inline void with_mask_row(const AttentionParams& p, const M* row, int64_t begin, int64_t count, F&& f) {
  const int64_t stride = p.mask_strides.column;
  if (!p.selected.given) return f(row + begin * stride, stride, int64_t{0}, count);
  constexpr int64_t kPiece = 64;
  M piece[kPiece];
  for (int64_t j = 0; j < count; j += kPiece) {
    const int64_t some = count - j < kPiece ? count - j : kPiece;
    for (int64_t i = 0; i < some; ++i) piece[i] = row[key_number(p, begin + j + i) * stride];
    f(static_cast<const M*>(piece), int64_t{1}, j, some);
  }
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
inline void add_mask(const bool* mask, int64_t stride, int64_t count, T* s) {
  int64_t j = 0;
#if defined(ATTNPACK_HALF_INSTRUCTIONS)  // compilers take the bools apart
  if constexpr (sizeof(T) == sizeof(float))
    for (; stride == 1 && j + kLanes<T> <= count; j += kLanes<T>)
      store<T>(s + j, where(mask + j, load<T>(s + j), broadcast(T(-kInfinity))));
#endif
  for (; j < count; ++j)
    if (!mask[j * stride]) s[j] = T(-kInfinity);
}

// Calls f with the mask from element `offset` on, in its type.
template <class F>
inline void with_mask(const AttentionParams& p, int64_t offset, F&& f) {
  switch (p.mask_dtype) {
    case DType::kFloat64:
      return f(static_cast<const double*>(p.mask) + offset);
    case DType::kFloat32:
      return f(static_cast<const float*>(p.mask) + offset);
    case DType::kBFloat16:
      return f(static_cast<const BFloat16*>(p.mask) + offset);
    case DType::kFloat16:
      return f(static_cast<const Float16*>(p.mask) + offset);
    case DType::kBool:
      return f(static_cast<const bool*>(p.mask) + offset);
  }
}

// A mask that all rows and heads of a sequence share, as padding masks are, often leaves one range of keys. Then the
// range takes its place, which costs nothing per score, and nothing at all for the keys outside.
class SharedMask {
 public:
  // Reads the mask of sequence b in the range `within`.
  SharedMask(const AttentionParams& p, int64_t b, Range within) : p_(&p), keys_(within) {
    const Strides& s = p.mask_strides;
    if (!p.mask || (s.row != 0 && p.q_len > 1) || (s.head != 0 && p.num_heads > 1)) return;
    bool is_range = true;
    with_mask(p, b * s.batch, [&](const auto* mask) {
      const auto element = [&](int64_t j) { return mask[key_number(p, j) * s.column]; };
      while (!keys_.empty() && !allows_key(element(keys_.begin))) ++keys_.begin;
      while (!keys_.empty() && !allows_key(element(keys_.end - 1))) --keys_.end;
      for (int64_t j = keys_.begin; j < keys_.end; ++j) is_range &= is_plain(element(j));
    });
    if (!is_range) return;
    without_ = p;
    without_.mask = nullptr;
    p_ = &without_;
  }
  SharedMask(const SharedMask&) = delete;
  SharedMask& operator=(const SharedMask&) = delete;

  // The call, without the mask if it is a range.
  const AttentionParams& params() const { return *p_; }
  // The keys from the first to the last that the mask leaves.
  Range keys() const { return keys_; }

 private:
  const AttentionParams* p_;
  Range keys_;
  AttentionParams without_;
};

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
      const int64_t distance = row.position - key_number(p, begin + j);
      s[j] -= slope * static_cast<T>(distance < 0 ? -distance : distance);
    }
  }
  if (p.mask) {
    const Strides& strides = p.mask_strides;
    with_mask(p, b * strides.batch + row.head * strides.head + row.query * strides.row, [&](const auto* mask) {
      with_mask_row(p, mask, begin, count, [&](const auto* piece, int64_t stride, int64_t first, int64_t some) {
        add_mask(piece, stride, some, s + first);
      });
    });
  }
  for (int64_t j = begin; j < end && j < row.keys.begin; ++j) s[j - begin] = -kInfinity;
  for (int64_t j = row.keys.end > begin ? row.keys.end : begin; j < end; ++j) s[j - begin] = -kInfinity;
  for (int64_t j = count; j < vectors * kLanes<T>; ++j) s[j] = -kInfinity;
}

inline bool dropped(const AttentionParams& p, int64_t b, const QueryRow& row, int64_t key) {
  return attnpack::dropped(p, b, row.head, row.query, key_number(p, key));
}

}  // namespace attnpack::ATTNPACK_ISA
