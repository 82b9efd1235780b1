#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

// The keys that rows name (key_index), one beside the other: nothing here is as wide as all keys.
namespace attnpack {

using at::Tensor;

struct SelectedColumns {
  Tensor keys;     // [B, 1 or Hkv, L, n * key_block] int64: the key's number, 0 where none counts
  Tensor counted;  // bool of that shape: false for -1, for a number out of range, and after a number's first place
};

SelectedColumns selected_columns(const Tensor& key_index,  // [B, 1 or Hkv, L, n]
                                 int64_t key_block, const c10::SymInt& kv_len);

// x at these keys. Autograd keeps the numbers for it, and not x, as for torch's gather.
Tensor at_columns(const Tensor& x,      // [B, H, L, Lkv]
                  const Tensor& keys);  // [B, 1 or H, L, n] -> [B, H, L, n]

}  // namespace attnpack
