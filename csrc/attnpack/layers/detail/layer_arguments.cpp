#include <attnpack/layers/detail/layer_arguments.h>

#include <attnpack/core/check.h>

namespace attnpack {

LayerArguments layer_arguments(const LayerInputs& inputs) {
  LayerArguments r{.positions = inputs.positions,
                   .cross = inputs.cross,
                   .mask = inputs.mask,
                   .causal = inputs.causal,
                   .kv_lens = inputs.kv_lens,
                   .dropout_p = inputs.dropout_p,
                   .scale = inputs.scale};
  if (inputs.rope) {
    const RopeSettings& rope = *inputs.rope;
    r.rope = {.inv_freq = rope.inv_freq,
              .factor = rope.factor,
              .interleaved = rope.interleaved,
              .growth = rope.growth,
              .trained_len = rope.trained_len,
              .raw_keys = rope.raw_keys};
    if (!rope.long_inv_freq.empty()) r.rope.long_inv_freq = rope.long_inv_freq;
  }
  return r;
}

ScoreArguments score_arguments(const AttendOptions& options) {
  ScoreArguments r{.window_left = options.window[0],
                   .window_right = options.window[1],
                   .softcap = options.softcap,
                   .sinks = options.sinks,
                   .alibi_slopes = options.alibi_slopes,
                   .key_index = options.key_index,
                   .key_block = options.key_block};
  if (options.head_map) r.head_map = *options.head_map;
  if (options.blocks) {
    r.key_block = options.blocks->block;
    r.top_blocks = options.blocks->top_blocks;
    r.local_blocks = options.blocks->local_blocks;
    r.scorer = options.blocks->scorer;
  }
  return r;
}

// The softmax factor is in the scale already.
std::optional<RopeSettings> rope_settings(const RopeArguments& rope) {
  if (!rope.inv_freq) return std::nullopt;
  RopeSettings r{rope.inv_freq->vec(), rope.factor, rope.interleaved};
  if (rope.long_inv_freq) r.long_inv_freq = rope.long_inv_freq->vec();
  r.growth = rope.growth;
  r.trained_len = rope.trained_len;
  r.raw_keys = rope.raw_keys;
  return r;
}

AttentionArguments attention_arguments(const LayerArguments& layer, const ScoreArguments& score) {
  return {.mask = layer.mask,
          .causal = layer.causal,
          .window_left = score.window_left,
          .window_right = score.window_right,
          .kv_lens = layer.kv_lens,
          .softcap = score.softcap,
          .sinks = score.sinks,
          .alibi_slopes = score.alibi_slopes,
          .head_map = score.head_map,
          .scale = layer.scale,
          .key_index = score.key_index,
          .key_block = score.top_blocks == 0 ? score.key_block : 1};
}

Tensor probabilities(const Tensor& query, const Tensor& key, const AttentionArguments& args, bool at_names) {
  return scores_formula(query, key, args, at_names ? "named" : "probs");
}

void check_at_names(bool at_names, const std::optional<Tensor>& key_index) {
  ATTNPACK_CHECK(!at_names || key_index, "at_names: got True without key_index, whose names it means; give key_index");
}

}  // namespace attnpack
