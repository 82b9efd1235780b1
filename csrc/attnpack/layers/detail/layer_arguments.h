#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <tuple>

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

// LayerInputs without the cache, because the cache's tensors differ by family.
struct LayerArguments {
  RopeArguments rope = {};
  std::optional<Tensor> positions = {};  // [L] or [B, L]
  bool cross = false;
  std::optional<Tensor> mask = {};
  bool causal = false;
  std::optional<Tensor> kv_lens = {};  // [B]
  double dropout_p = 0.0;
  std::optional<double> scale = {};

  auto members() const {
    return std::tuple_cat(rope.members(), std::tie(positions, cross, mask, causal, kv_lens, dropout_p, scale));
  }
};
#define ATTNPACK_LAYER_SCHEMA                                                                                 \
  "float[]? rope_inv_freq, float rope_factor, bool rope_interleaved, float[]? rope_long_inv_freq, float "     \
  "rope_growth, int rope_trained_len, bool rope_raw_keys, Tensor? positions, bool cross, Tensor? mask, bool " \
  "causal, Tensor? kv_lens, float dropout_p, float? scale"

struct CacheArguments {
  std::optional<Tensor> key = {}, value = {}, lengths = {}, dropped = {};
  int64_t window = -1;
  int64_t keep_first = 0;
  int64_t bits = 0;
  std::optional<Tensor> exact_key = {}, exact_value = {}, block_table = {}, block_sums = {};

  auto members() const {
    return std::tie(key, value, lengths, dropped, window, keep_first, bits, exact_key, exact_value, block_table,
                    block_sums);
  }
};
#define ATTNPACK_CACHE_SCHEMA                                                                                        \
  "Tensor(a!)? cache_key, Tensor(b!)? cache_value, Tensor(c!)? cache_lengths, Tensor? cache_dropped, int "           \
  "cache_window, int cache_keep_first, int cache_bits, Tensor(d!)? cache_exact_key, Tensor(e!)? cache_exact_value, " \
  "Tensor? cache_block_table, Tensor(f!)? cache_block_sums"

struct LatentCacheArguments {
  std::optional<Tensor> latents = {}, lengths = {};

  auto members() const { return std::tie(latents, lengths); }
};
#define ATTNPACK_LATENT_CACHE_SCHEMA "Tensor(a!)? cache_latents, Tensor(b!)? cache_lengths"

// The arguments that attention over heads of keys has, but not latent attention.
struct ScoreArguments {
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0.0;
  std::optional<Tensor> sinks = {};         // [Hq]
  std::optional<Tensor> alibi_slopes = {};  // [Hq]
  at::OptionalIntArrayRef head_map = {};
  std::optional<Tensor> key_index = {};  // [B, 1 or Hkv, L, n]
  int64_t key_block = 1;
  int64_t top_blocks = 0;  // above 0: blocks are chosen, by the scorer
  int64_t local_blocks = 0;
  c10::string_view scorer = "mean";

  auto members() const {
    return std::tie(window_left, window_right, softcap, sinks, alibi_slopes, head_map, key_index, key_block, top_blocks,
                    local_blocks, scorer);
  }
  bool names_keys() const { return key_index || top_blocks != 0; }
};
// key_index has a default, so every argument after it has one too.
#define ATTNPACK_SCORE_SCHEMA                                                                                \
  "int window_left, int window_right, float softcap, Tensor? sinks, Tensor? alibi_slopes, int[]? head_map, " \
  "Tensor? key_index=None, int key_block=1, int top_blocks=0, int local_blocks=0, str scorer=\"mean\""

LayerArguments layer_arguments(const LayerInputs& inputs);
ScoreArguments score_arguments(const AttendOptions& options);
std::optional<RopeSettings> rope_settings(const RopeArguments& rope);

// The operator's arguments, without dropout and without those that the cache decides.
AttentionArguments attention_arguments(const LayerArguments& layer, const ScoreArguments& score = {});

// The probabilities that a layer returns: of all keys, or at_names those of the keys of key_index alone.
Tensor probabilities(const Tensor& query, const Tensor& key, const AttentionArguments& args, bool at_names);
// Raises for names that no key_index gives.
void check_at_names(bool at_names, const std::optional<Tensor>& key_index);

}  // namespace attnpack
