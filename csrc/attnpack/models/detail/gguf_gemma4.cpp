#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_families.h>

#include <cmath>

namespace attnpack {

// Gemma 4: layers with a window have heads, a base and heads of keys of their own; the last layers read the keys of
// those before them.
namespace {
using Options = CausalLMOptions;

const std::string kLayerInputs = "model.layer_inputs.embed_tokens.weight";

int64_t count_shared(const GgufSettings& file) {
  const auto* key = "attention.shared_kv_layers";
  const auto count = file.size_if_set(key).value_or(0), layers = file.size("block_count");
  file.check(count < layers, file.full(key), " is ", count, ", wants less than block_count, ", layers, kDamaged);
  return count;
}

// The settings of layers with a window.
LayerSettings sliding_layer(const GgufSettings& file, const Options& o) {
  const auto head_dim = file.size("attention.key_length_swa", *o.head_dim());
  for (const char* key : {"attention.value_length_swa", "rope.dimension_count_swa"})
    check_width(file, key, "attention.key_length_swa", head_dim);
  return LayerSettings()
      .window(Window{file.size("attention.sliding_window") - 1, 0})
      .head_dim(head_dim)
      .rope_base(file.number("rope.freq_base_swa", 10000))
      .rope_scaling(RopeScaling());
}

void set_layers(const GgufSettings& file, Options& o) {
  const auto count = o.num_layers();
  const auto sliding = sliding_layer(file, o);
  const auto slides = sliding_layers(file, count, 6);
  const auto heads = file.by_layer("attention.head_count_kv", count, o.num_heads());
  const auto widths = file.by_layer("feed_forward_length", count);
  const auto own = count - count_shared(file);
  for (int64_t i = 0; i < count; ++i) {
    auto layer = slides[i] ? sliding : LayerSettings().window(Window{-1, -1});
    layer.num_kv_heads(heads[i]).hidden_dim(widths[i]);
    if (i >= own) {
      int64_t source = own - 1;
      while (source >= 0 && slides[source] != slides[i]) --source;
      file.check(source >= 0, file.full("attention.shared_kv_layers"), " = ", count - own,
                 " leaves no layer of the kind of layer ", i, " with keys of its own", kDamaged);
      layer.kv_from(source);
    } else if (!file.has_shape("model.layers." + std::to_string(i) + ".self_attn.v_proj.weight")) {
      layer.keys_as_values(true);
    }
    o.layer_settings().push_back(layer);
  }
}

// Scores are not scaled, and values are normed like keys, without weights.
void configure_gemma4(const GgufSettings& file, Options& o) {
  file.check(file.file().has(kRopeFreqs), "lacks ", kRopeFreqs, ", the divisors of layers without a window; ",
             kGetFileAgain);
  o.layout("sandwich")
      .activation("geglu_tanh")
      .embed_scale(std::pow(static_cast<double>(o.embed_dim()), 0.5))
      .qk_norm(QkNorm(true).eps(o.eps()).values(true))
      .scores(ScoreSettings().scale(1.0))
      .tail(TailSettings());
  set_layers(file, o);
  if (file.is_set("final_logit_softcapping")) o.final_softcap(file.number("final_logit_softcapping"));
  if (const auto width = file.size_if_set("embedding_length_per_layer_input")) {
    const auto table = file.shapes().find(kLayerInputs);
    const auto rows = table == file.shapes().end() ? o.vocab_size() : static_cast<int64_t>(table->second.at(0));
    o.tail(TailSettings().input_dim(width).vocab_size(rows));
  }
}

GgufRecipes gemma4_recipes(const GgufSettings&) {
  return {one_part("per_layer_token_embd.weight", kLayerInputs.c_str(), nullptr, true),
          one_part("per_layer_model_proj.weight", "model.layer_inputs.model_projection.weight", nullptr, true),
          one_part("per_layer_proj_norm.weight", "model.layer_inputs.projection_norm.weight", nullptr, true),
          one_part("layer_output_scale.weight", "tail.scalar")};
}

// Keys and values that some files have for layers that read those of others.
std::set<std::string> unread_of_gemma4(const GgufSettings& file) {
  const auto layers = file.size("block_count"), shared = count_shared(file);
  std::set<std::string> names;
  for (int64_t i = layers - shared; i < layers; ++i)
    for (const char* name : {"attn_k", "attn_v", "attn_k_norm"})
      names.insert("blk." + std::to_string(i) + "." + name + ".");
  return names;
}

}  // namespace

GgufFamily gguf_gemma4() {
  return {.architecture = "gemma4",
          .configure = configure_gemma4,
          .names = joined(
              {sandwich_names(), {{"inp_gate", "tail.gate"}, {"proj", "tail.projection"}, {"post_norm", "tail.norm"}}}),
          .settings = {"final_logit_softcapping", "rope.freq_base_swa", "attention.key_length_swa",
                       "attention.shared_kv_layers", "attention.value_length_swa", "rope.dimension_count_swa"},
          .windows = true,
          .listed = {"attention.head_count_kv", "feed_forward_length"},
          .recipes = gemma4_recipes,
          .unread = unread_of_gemma4};
}

}  // namespace attnpack
