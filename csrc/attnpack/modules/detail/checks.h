#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/modules/attention_module.h>

#include <array>
#include <optional>
#include <vector>

namespace attnpack {

// Settings of the scores that no input can make right.
void check_settings(const std::optional<Window>& window, double softcap, double dropout,
                    const std::optional<double>& scale);

// A size of a module: at least 1.
void check_size(const char* name, int64_t size);

// head_dim as given, else embed_dim / num_heads, which must be whole.
int64_t resolve_head_dim(int64_t embed_dim, int64_t num_heads, const std::optional<int64_t>& head_dim);

// Every head reads one kv head: the map names num_heads of them, or num_kv_heads divides num_heads.
void check_heads(int64_t num_heads, int64_t num_kv_heads, const std::optional<std::vector<int64_t>>& head_map);

// input is on the device of weight.
void check_device(const char* name, const at::Tensor& input, const at::Tensor& weight);

// input is [B, L, width] in the dtype and on the device of weight.
void check_input(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight);

// Context and cache exclude each other, value_context needs a context of its length, and batches agree.
void check_inputs(const at::Tensor& x, const AttentionInputs& inputs);

// positions, where given, are int64 [L] or [B, L] for x [B, L, E]: also where there is no RoPE to read them.
void check_positions(const std::optional<at::Tensor>& positions, const at::Tensor& x);

// The same for [..., width], which norms and feed-forwards map token by token.
void check_tokens(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight);

// lengths, where given, are int32 or int64, one for each sequence of x [B, L, ...], and low to L where they lie on the
// CPU: elsewhere reading would wait for the device.
void check_lengths(const char* name, const std::optional<at::Tensor>& lengths, const at::Tensor& x, int64_t low = 0);

// Every one of lengths is low to high; reads them, so that a call waits for the device.
void check_length_values(const char* name, const at::Tensor& lengths, int64_t low, int64_t high);

}  // namespace attnpack
