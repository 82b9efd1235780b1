#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

namespace attnpack {

// The tensors of one layer's KV cache, as the ops take them; written by the layer's function.
struct CacheTensors {
  at::Tensor key;      // [B, Hkv, capacity, D]; of latent attention [B, 1, capacity, kv_lora_rank + rope]
  at::Tensor value;    // [B, Hkv, capacity, Dv]; of latent attention nothing, Dv = 0
  at::Tensor lengths;  // [B] int64: positions held before the call, raised by it
};

// The positions of a cache that may be read: a mask over fewer than there is room for says which.
struct Room {
  at::Tensor key, value;
  std::optional<c10::SymInt> limit;
};
Room room_under(const CacheTensors& cache, const std::optional<at::Tensor>& mask);

// Appends, and gives the room's keys and values as the layer reads them: differentiable in the new rows, and only in
// them. `past` is a copy of the lengths before.
Room append(const CacheTensors& cache, const Room& room,
            const at::Tensor& key,    // [B, Hkv, L, D]
            const at::Tensor& value,  // [B, Hkv, L, Dv]
            const at::Tensor& past,   // [B]
            const std::optional<at::Tensor>& new_lens);

// A dropout seed drawn from torch's generator, where there is dropout.
std::optional<at::Tensor> dropout_seed(double dropout_p);

}  // namespace attnpack
