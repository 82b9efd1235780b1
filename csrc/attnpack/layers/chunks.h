#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace attnpack {

// Chunked attention (Llama 4): a query attends only keys of its own chunk of so many positions, on top of `mask`, which
// may be bool or additive, broadcastable to [B, Hq, L, keys]. The result is of the same kind, and has the columns of a
// mask with more than one.
at::Tensor mask_of_chunks(const at::Tensor& counted,  // int64 [L] or [B, L], positions of the queries in the cache
                          c10::SymInt keys, int64_t chunk, const std::optional<at::Tensor>& mask);

}  // namespace attnpack
