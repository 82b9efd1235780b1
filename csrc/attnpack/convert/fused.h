#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace attnpack::convert {

// Splits fused query, key and value projections and fuses them again, bit for bit. layout:
//   "concat"    rows [Q | K | V]: torch's in_proj_weight, nanoGPT, GPTBigCode with one kv head
//   "grouped"   for each kv head [its query heads | k | v]: Falcon, and GPTBigCode without multi_query
//   "conv1d"    columns [Q | K | V] of a transposed weight [E, rows]: GPT-2; its bias is "concat"'s
// A bias is split as the rows are.
std::tuple<at::Tensor, at::Tensor, at::Tensor> split_qkv(
    const at::Tensor& weight,  // [(num_heads + 2 num_kv_heads) * D, E], transposed for "conv1d"; or a bias
    const std::string& layout, int64_t num_heads, int64_t num_kv_heads);

// The inverse: the fused weight or bias.
at::Tensor fuse_qkv(const at::Tensor& q,  // [num_heads * D, E], or a bias
                    const at::Tensor& k,  // [num_kv_heads * D, E]
                    const at::Tensor& v,  // [num_kv_heads * D, E]
                    const std::string& layout, int64_t num_heads, int64_t num_kv_heads);

}  // namespace attnpack::convert
