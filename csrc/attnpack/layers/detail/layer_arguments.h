#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <tuple>
#include <type_traits>

#include <attnpack/layers/attend.h>
#include <attnpack/ops/detail/attention_arguments.h>

// The arguments of the layer ops as structs, each with its text in a schema (see ops/detail/schema.h). The structs
// refer to numbers that the options hold.
namespace attnpack {

// How to rotate. Without inv_freq nothing rotates.
struct RopeArguments {
  std::optional<at::ArrayRef<double>> inv_freq = {};
  double factor = 1.0;
  bool interleaved = false;
  std::optional<at::ArrayRef<double>> long_inv_freq = {};
  double growth = 0.0;
  int64_t trained_len = 0;
  bool raw_keys = false;

  auto members() const { return std::tie(inv_freq, factor, interleaved, long_inv_freq, growth, trained_len, raw_keys); }
};

#define ATTNPACK_ROPE_SCHEMA                                                                                      \
  "float[]? rope_inv_freq=None, float rope_factor=1.0, bool rope_interleaved=False, float[]? rope_long_inv_freq=" \
  "None, float rope_growth=0.0, int rope_trained_len=0, bool rope_raw_keys=False"

// LayerInputs without the rules and the cache, because the cache's tensors differ by family.
struct LayerArguments {
  RopeArguments rope = {};
  std::optional<Tensor> positions = {};  // [L] or [B, L]
  bool cross = false;
  std::optional<Tensor> mask = {};
  std::optional<Tensor> kv_lens = {};  // [B]

  auto members() const { return std::tuple_cat(rope.members(), std::tie(positions, cross, mask, kv_lens)); }
};
// The arguments after them need defaults too.
#define ATTNPACK_LAYER_SCHEMA \
  ATTNPACK_ROPE_SCHEMA ", Tensor? positions=None, bool cross=False, Tensor? mask=None, Tensor? kv_lens=None"

// CacheTensors, or nothing where there is no cache.
struct CacheArguments {
  template <class T>
  using Argument = std::conditional_t<std::is_same_v<T, Tensor>, std::optional<Tensor>, T>;
#define ATTNPACK_CACHE_ARGUMENT(type, name, value, text) Argument<type> name = value;
  ATTNPACK_CACHE_TENSORS(ATTNPACK_CACHE_ARGUMENT)
#undef ATTNPACK_CACHE_ARGUMENT

  auto members() const {
#define ATTNPACK_TIE_MEMBER(type, name, value, text) std::tie(name),
    return std::tuple_cat(ATTNPACK_CACHE_TENSORS(ATTNPACK_TIE_MEMBER) std::tie());
#undef ATTNPACK_TIE_MEMBER
  }
};
// The text of the arguments, which follow others in a schema.
#define ATTNPACK_CACHE_TEXT(type, name, value, text) ", " text
#define ATTNPACK_CACHE_SCHEMA ATTNPACK_CACHE_TENSORS(ATTNPACK_CACHE_TEXT)

struct LatentCacheArguments {
  std::optional<Tensor> latents = {}, lengths = {};

  auto members() const { return std::tie(latents, lengths); }
};
#define ATTNPACK_LATENT_CACHE_SCHEMA "Tensor(a!)? cache_latents=None, Tensor(b!)? cache_lengths=None"

// The keys that queries name, or that are chosen for them.
struct KeyChoice {
  std::optional<Tensor> key_index = {};  // [B, 1 or Hkv, L, n]
  int64_t key_block = 1;
  int64_t top_blocks = 0;  // above 0: blocks are chosen, by the scorer
  int64_t local_blocks = 0;
  c10::string_view scorer = "mean";

  auto members() const { return std::tie(key_index, key_block, top_blocks, local_blocks, scorer); }
  bool names_keys() const { return key_index || top_blocks != 0; }
};
#define ATTNPACK_KEY_CHOICE_SCHEMA \
  "Tensor? key_index=None, int key_block=1, int top_blocks=0, int local_blocks=0, str scorer=\"mean\""

LayerArguments layer_arguments(const LayerInputs& inputs);
KeyChoice key_choice(const AttendOptions& options);
std::optional<RopeSettings> rope_settings(const RopeArguments& rope);

// The operator's arguments, without those that the cache decides. Dropout is checked here, and joins after everything
// else is checked.
AttentionArguments attention_arguments(const LayerArguments& layer, const ScoreRules& rules,
                                       const KeyChoice& choice = {});

// The probabilities that a layer returns: of all keys, or with at_names only those of the keys of key_index.
Tensor probabilities(const Tensor& query, const Tensor& key, const AttentionArguments& args, bool at_names);
// Raises for names that no key_index gives.
void check_at_names(bool at_names, const std::optional<Tensor>& key_index);

}  // namespace attnpack
