#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// The products of queries with the keys of their kv head, in fp32, of fp64 in fp64: what a choice of keys is made of.
// On the CPU few queries stream the keys once, where they are and as they are. No gradient flows.
at::Tensor key_products(const at::Tensor& query,  // [B, Hq, L, D]
                        const at::Tensor& key);   // [B, Hkv, Lkv, D] -> [B, Hq, L, Lkv]

// The same with gradients, by torch's matmul.
at::Tensor key_products_formula(const at::Tensor& query, const at::Tensor& key);

}  // namespace attnpack
