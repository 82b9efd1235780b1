#include <attnpack/layers/detail/layer_arguments.h>

#include <attnpack/core/check.h>

namespace attnpack {

LayerArguments layer_arguments(const LayerInputs& inputs) {
  LayerArguments r{
      .positions = inputs.positions, .cross = inputs.cross, .mask = inputs.mask, .kv_lens = inputs.kv_lens};
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

KeyChoice key_choice(const AttendOptions& options) {
  if (!options.blocks) return {options.key_index, options.key_block};
  const BlockOptions& blocks = *options.blocks;
  return {options.key_index, blocks.block, blocks.top_blocks, blocks.local_blocks, blocks.scorer};
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

AttentionArguments attention_arguments(const LayerArguments& layer, const ScoreRules& rules, const KeyChoice& choice) {
  check_dropout(rules.dropout_p);
  AttentionArguments r{rules};
  r.dropout_p = 0;
  r.mask = layer.mask;
  r.kv_lens = layer.kv_lens;
  r.key_index = choice.key_index;
  r.key_block = choice.top_blocks == 0 ? choice.key_block : 1;
  return r;
}

Tensor probabilities(const Tensor& query, const Tensor& key, const AttentionArguments& args, bool at_names) {
  return scores_formula(query, key, args, at_names ? "named" : "probs");
}

void check_at_names(bool at_names, const std::optional<Tensor>& key_index) {
  ATTNPACK_CHECK(!at_names || key_index, "at_names: got True without key_index, whose names it means; give key_index");
}

}  // namespace attnpack
