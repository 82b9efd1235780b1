#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

// Sums of blocks of keys, from which "mean" (select_keys.h) makes its scores: in fp32, or fp64 for fp64 keys.
namespace attnpack {

// The sum of each block's valid keys. Blocks without a valid key are unspecified. All keys are read once where they
// are; only the block in which a sequence ends is copied, to leave out what is after the end.
at::Tensor sum_blocks(const at::Tensor& key,  // [B, Hkv, Lkv, D]
                      const c10::SymInt& blocks, const c10::SymInt& block,
                      const std::optional<at::Tensor>& kv_lens);  // [B] -> [B, Hkv, blocks, D]

// Writes the sums of the blocks that new_len new positions after `past` reach into, and no others: each from the keys
// themselves, so that the sum of a whole block has the bits of sum_blocks, and one that has been cropped is made anew.
void update_block_sums(const at::Tensor& sums,     // [B, Hkv, blocks, D], written
                       const at::Tensor& key,      // [B, Hkv, capacity, D], with the new positions
                       const at::Tensor& past,     // [B], positions before them
                       const at::Tensor& lengths,  // [B], and with them
                       const c10::SymInt& new_len, const c10::SymInt& block);

}  // namespace attnpack
