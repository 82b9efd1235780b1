#pragma once

#include <attnpack/models/detail/gguf_families.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

// Which tensors of a GGUF file make a CausalLM's, under the names of its state dict.
namespace attnpack {

// Where a tensor of the state dict lies: in rows of one tensor of the file, or among those that a recipe makes.
struct GgufPiece {
  std::vector<int64_t> shape;
  std::vector<std::string> sources;
  int64_t first = 0;                                   // of these rows
  std::shared_ptr<const GgufRecipe> recipe = nullptr;  // none: rows as they are
  size_t target = 0;                                   // which of those that the recipe makes
};
using GgufPieces = std::map<std::string, GgufPiece>;

// Raises for a tensor that has no place in the architecture, and for one whose shape does not fit the sizes.
GgufPieces gguf_pieces(const GgufSettings& file, const GgufFamily& family, const GgufSizes& sizes);

}  // namespace attnpack
