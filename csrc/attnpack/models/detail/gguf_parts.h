#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

// Tensors of a GGUF file that hold a CausalLM's otherwise: other rows, other shapes, other numbers, or several of them
// as one.
namespace attnpack {

// How tensors of a layer, by their names in the state dict, are made of tensors of the file, all at once. Names come
// without the number of the layer.
struct GgufRecipe {
  std::vector<std::string> sources, targets;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& sources)> make;
  // Whether it only chooses and moves rows of one source: then it can do so with blocks of stored weights.
  bool rows = false;
};
using GgufRecipes = std::vector<GgufRecipe>;
using GgufChange = std::function<at::Tensor(const at::Tensor&)>;

// A recipe that makes one tensor of one source, which it takes over without `change`.
GgufRecipe one_part(const char* source, const char* target, const GgufChange& change = nullptr, bool rows = false);
// A recipe that makes two tensors of one source, whose rows lie head by head: first those of the one, then those of the
// other.
GgufRecipe two_parts(const char* source, const char* first, const char* second, int64_t heads, int64_t first_rows,
                     int64_t second_rows);

// A_log of a decay that is stored as -exp(A_log).
at::Tensor log_decay(const at::Tensor& x);
// A convolution by channel, [channels, 1, taps], of one that is stored as [channels, taps], or that with dims of 1.
at::Tensor channels_first(const at::Tensor& x);
// Heads group by group, as they share their keys, of those that are stored by turns: one of each group, then the next
// of each. The first numbers along the dim belong to no head.
GgufChange group_heads(int64_t groups, int64_t heads, int64_t first = 0, int64_t dim = 0);
// kv_b_proj of a file that holds its two halves for absorbed heads: W_UK [heads, rank, qk_nope_head_dim] and W_UV
// [heads, v_head_dim, rank].
GgufRecipe latent_halves();

}  // namespace attnpack
