#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <tuple>

#include <attnpack/ops/kv_cache.h>

// Caches that keep a window of the positions: those that causality and a window (left, 0) leave to the positions to
// come, and the first `keep_first` ones. Position p < keep_first of a sequence lies in slot p, a later one in slot
// p - dropped. Each sequence drops multiples of kKeyAlignment (core/params.h), so that attention over what is left has
// the bits of attention over all.
namespace attnpack {

// Moves the positions that are still needed to the front of new tensors with `capacity` slots: the first keep_first
// ones and the last `window` ones of each sequence, and up to kKeyAlignment - 1 before these. Slots after them are 0.
// Returns key [B, Hkv, capacity, D], value [B, Hkv, capacity, Dv] and dropped [B].
std::tuple<at::Tensor, at::Tensor, at::Tensor> kv_window_slide(const at::Tensor& key,      // [B, Hkv, slots, D]
                                                               const at::Tensor& value,    // [B, Hkv, slots, Dv]
                                                               const at::Tensor& lengths,  // [B] int64
                                                               const at::Tensor& dropped,  // [B] int64
                                                               const c10::SymInt& capacity, int64_t window,
                                                               int64_t keep_first);

// New lengths and dropped [B] of sequences that keep their first n positions. It raises where a sequence has dropped
// positions that the window before position n has. Reads both tensors: on another device it waits for that device.
std::tuple<at::Tensor, at::Tensor> kv_window_crop(const at::Tensor& lengths, const at::Tensor& dropped,
                                                  const c10::SymInt& n, int64_t window, int64_t keep_first);

// dropped [B] after a slide.
at::Tensor dropped_by_slide(const at::Tensor& lengths, const at::Tensor& dropped, int64_t window, int64_t keep_first);

// The positions of the cache's slots, [B, slots]. Slots that hold nothing have positions from lengths on.
at::Tensor positions_of_slots(const CacheTensors& cache);

void check_kv_window_slide(const at::Tensor& key, const at::Tensor& value, const at::Tensor& lengths,
                           const at::Tensor& dropped, const c10::SymInt& capacity, int64_t window, int64_t keep_first);

}  // namespace attnpack
