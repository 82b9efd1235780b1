#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/modules/attention_module.h>

#include <array>
#include <optional>
#include <vector>

namespace attnpack {

// Arguments whose mathematics this version does not have; each raises a sentence that names it.
struct UnbuiltArguments {
  std::optional<Window> window;
  double softcap = 0, dropout = 0;
  bool sinks = false, alibi = false;
};
void refuse_unbuilt(const UnbuiltArguments& arguments);

// head_dim as given, else embed_dim / num_heads, which must be whole.
int64_t resolve_head_dim(int64_t embed_dim, int64_t num_heads, const std::optional<int64_t>& head_dim);

// Every head reads one kv head: the map names num_heads of them, or num_kv_heads divides num_heads.
void check_heads(int64_t num_heads, int64_t num_kv_heads, const std::optional<std::vector<int64_t>>& head_map);

// input is [B, L, width] in the dtype and on the device of weight.
void check_input(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight);

// Context and cache exclude each other, value_context needs a context, and batches agree.
void check_inputs(const at::Tensor& x, const AttentionInputs& inputs);

}  // namespace attnpack
