#pragma once

#include <attnpack/models/causal_lm.h>
#include <attnpack/models/detail/gguf_parts.h>
#include <attnpack/models/detail/gguf_settings.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

// The architectures of GGUF files: how llama.cpp's converter names and fuses their tensors, and what their models have
// beside Llama's. A setting that llama.cpp keeps in its code, and not in the file, stands here too.
namespace attnpack {

// Names in the state dict of a layer's tensors, by the names in the file; * stands for the number of an expert.
using GgufNames = std::map<std::string, std::string>;

// An architecture: how it differs from Llama, whose settings the options have already when `configure` is called.
struct GgufFamily {
  std::string architecture;
  void (*configure)(const GgufSettings& file, CausalLMOptions& options) = nullptr;
  GgufNames names = {};                                        // beside Llama's
  std::map<std::string, std::vector<std::string>> fused = {};  // tensors whose rows are those of several projections
  bool interleaved = false;                                    // the rows of q and k are stored as RoPE pairs
  bool layer_norm = false;                                     // the norms are LayerNorms
  std::set<std::string> settings = {};                         // beside Llama's, which `configure` reads
  bool windows = false;                                        // `configure` says the window of each layer
  std::set<std::string> listed = {};                           // settings that may list a number for each layer
  GgufRecipes (*recipes)(const GgufSettings& file) = nullptr;
  // How the names of tensors begin that nothing reads; none of these begins with another.
  std::set<std::string> (*unread)(const GgufSettings& file) = nullptr;
};
using GgufFamilies = std::vector<GgufFamily>;

// The architectures that can be read. A new one is a row of a table in the file of its kind, which gguf_configure.h
// names.
const GgufFamilies& gguf_families();

// The family of the file; raises for one that cannot be read.
const GgufFamily& gguf_family(const GgufSettings& file);

// The sizes by which tensors are cut.
struct GgufSizes {
  int64_t embed_dim, num_layers, num_heads, num_kv_heads, head_dim;
};

// Raises for sizes that no tensor of the file has, and for settings that CausalLM does not have, by their names.
GgufSizes gguf_sizes(const GgufSettings& file, const GgufFamily& family);
// How many layers there are behind the last that only draft tokens: they are not read.
int64_t further_layers(const GgufSettings& file, const GgufFamily& family);

// The options of the model; the file knows the shapes of its tensors already. max_positions limits the file's own
// context.
CausalLMOptions gguf_options(const GgufSettings& file, const GgufFamily& family, const GgufSizes& sizes,
                             std::optional<int64_t> max_positions);

// The divisors of the frequencies of RoPE.
inline constexpr const char* kRopeFreqs = "rope_freqs.weight";
// How the file scales the angles of RoPE; none if they are not scaled.
std::optional<RopeScaling> gguf_rope_scaling(const GgufSettings& file, const GgufFamily& family, int64_t head_dim);

}  // namespace attnpack
