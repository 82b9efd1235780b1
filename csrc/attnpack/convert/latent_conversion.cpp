#include <attnpack/convert/latent_conversion.h>

#include <ATen/ATen.h>

#include <attnpack/convert/detail/joined_rope.h>
#include <attnpack/convert/detail/latent_layer.h>
#include <attnpack/core/check.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace attnpack::convert {

namespace {

bool is_window(const std::optional<Window>& window) { return window && *window != Window{-1, -1}; }

// Names all settings that would be lost.
void check_has_latent_form(const CausalLMOptions& o, const RopeSettings& rope) {
  std::string lost;
  const auto lacks = [&](bool given, const auto&... words) {
    if (given) lost += text_of({lost.empty() ? "" : ", ", words...});
  };
  const auto scores = o.scores().value_or(ScoreSettings());
  const auto any = [&](const auto& given) {
    return std::any_of(o.layer_settings().begin(), o.layer_settings().end(), given);
  };
  lacks(bool(o.qk_norm()), "qk_norm (norms of queries and keys)");
  lacks(is_window(o.window()) || any([](const LayerSettings& layer) { return is_window(layer.window()); }),
        "window (layers that do not attend to all keys)");
  lacks(any([](const LayerSettings& layer) { return layer.chunk().has_value(); }), "chunk (chunked attention)");
  lacks(scores.softcap() != 0, "softcap (a soft cap on the scores)");
  lacks(scores.sinks(), "sinks");
  lacks(scores.alibi(), "alibi");
  lacks(bool(scores.query_scale()), "query_scale (scores that grow with the position)");
  lacks(scores.gate().has_value(), "gate (gates on the heads)");
  lacks(o.recurrent().has_value(), "recurrent (layers with a state)");
  lacks(o.tail().has_value(), "tail (inputs per layer)");
  lacks(o.position_embedding() != "rope" || any([](const LayerSettings& layer) { return !layer.rope(); }),
        "layers without RoPE (position_embedding, rope)");
  lacks(any([](const LayerSettings& layer) { return layer.rope_base() || layer.rope_scaling(); }),
        "layers with a RoPE of their own (rope_base, rope_scaling)");
  lacks(rope.growth > 0, "rope_scaling 'dynamic' (frequencies that grow with the text)");
  lacks(std::count(rope.inv_freq.begin(), rope.inv_freq.end(), 0.0) > 0, "rope_scaling 'proportional'");
  lacks(any([](const LayerSettings& layer) { return layer.num_kv_heads() || layer.head_dim(); }),
        "layers with heads of their own (num_kv_heads, head_dim)");
  lacks(any([](const LayerSettings& layer) { return layer.keys_as_values(); }), "keys_as_values");
  lacks(any([](const LayerSettings& layer) { return layer.kv_from().has_value(); }), "kv_from (shared keys)");
  lacks(o.norm() != "rms", "norm '", o.norm(), "'");
  lacks(o.layout().has_value(), "layout '", o.layout().value_or(""), "'");
  ATTNPACK_CHECK(lost.empty(), "model: got one with what latent attention cannot hold here: ", lost,
                 "; leave it as it is, or convert it by --kv-heads, or its layers by to_mla");
}

int64_t rotated_dims(const CausalLMOptions& o) {
  return o.scores().value_or(ScoreSettings()).rope_dim().value_or(*o.head_dim());
}

// With the defaults that a model fills in.
CausalLMOptions complete(CausalLMOptions o) {
  if (o.latent()) return o;
  o.num_kv_heads(o.num_kv_heads().value_or(o.num_heads()));
  o.head_dim(o.head_dim().value_or(o.embed_dim() / o.num_heads()));
  return o;
}

const std::string kAttention = "self_attn.";
constexpr int64_t kMostRank = 1 << 16;  // so that a slip of the keyboard does not take all memory

}  // namespace

// One layer's attention.
struct LatentConversion::Layer {
  AttentionWeights weights;
  at::Tensor o_bias, input_norm;
  LatentOptions options;
};

LatentConversion::LatentConversion(const CausalLMOptions& source, int64_t kv_lora_rank, std::optional<int64_t> rope_dim,
                                   int64_t length)
    : source_(complete(source)), kv_lora_rank_(kv_lora_rank), length_(length) {
  ATTNPACK_CHECK(!source_.latent(), "model: got one of latent attention, which needs no conversion");
  const auto kv_heads = *source_.num_kv_heads(), whole = kv_heads * rotated_dims(source_);
  rope_ = rope_settings(rotated_dims(source_), source_.rope_base(), source_.max_positions(), source_.rope_scaling(),
                        source_.rope_interleaved());
  check_has_latent_form(source_, rope_);
  const auto full = 2 * kv_heads * *source_.head_dim(), most = std::max(full, kMostRank);
  ATTNPACK_CHECK(kv_lora_rank >= 2 && kv_lora_rank <= most, "kv_lora_rank: got ", kv_lora_rank, ", want 2 to ", most,
                 "; the full rank is ", full, ", and more is padding");
  rope_dim_ = rope_dim.value_or(whole);
  ATTNPACK_CHECK(rope_dim_ >= 2 && rope_dim_ % 2 == 0 && rope_dim_ <= whole, "rope_dim: got ", rope_dim_,
                 ", want an even number from 2 to ", whole, ", the dims that rotate in all kv heads together");
  if (rope_dim_ == whole) pairs_.assign(rope_.inv_freq.size(), kv_heads);
  scale_ = source_.scores()
               .value_or(ScoreSettings())
               .scale()
               .value_or(1.0 / std::sqrt(static_cast<double>(*source_.head_dim())));
}

LatentConversion::Layer LatentConversion::open(const StateDict& tensors, const at::Tensor& calibration) const {
  const auto find = [&](const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? at::Tensor() : found->second.detach();
  };
  const auto need = [&](const std::string& name) {
    const auto tensor = find(name);
    ATTNPACK_CHECK(tensor.defined(), "tensors: got none of the name ", name, ", want those of a layer");
    return tensor;
  };
  const auto of_attention = [&](const char* name) { return find(kAttention + name); };
  const auto norm = need("input_layernorm.weight");
  // Without a text each number that the norm can give counts alike.
  const Calibration seen{calibration.defined() ? calibration : norm.to(at::kDouble).diag(), {}, {}};
  return {{need(kAttention + "q_proj.weight"), need(kAttention + "k_proj.weight"), need(kAttention + "v_proj.weight"),
           need(kAttention + "o_proj.weight"), of_attention("q_proj.bias"), of_attention("k_proj.bias"),
           of_attention("v_proj.bias")},
          of_attention("o_proj.bias"),
          norm,
          LatentOptions(source_.num_heads(), *source_.num_kv_heads(), kv_lora_rank_)
              .inv_freq(rope_.inv_freq)
              .interleaved(rope_.interleaved)
              .rope_factor(rope_.factor)
              .length(length_)
              .calibration(seen)};
}

void LatentConversion::learn(const StateDict& tensors, const at::Tensor& calibration) {
  if (!learns()) return;
  const auto layer = open(tensors, calibration);
  const auto losses = rotation_losses(layer.weights, layer.options).cpu();
  losses_ = losses_.defined() ? losses_ + losses : losses;
}

const std::vector<int64_t>& LatentConversion::pairs() {
  if (pairs_.empty()) {
    ATTNPACK_CHECK(losses_.defined(), "rope_dim: got ", rope_dim_,
                   ", which learn() deals out, want all layers given to ", "learn() before");
    pairs_ = choose_pairs(losses_, rope_dim_);
  }
  return pairs_;
}

StateDict LatentConversion::convert(const StateDict& tensors, const at::Tensor& calibration) {
  auto layer = open(tensors, calibration);
  StateDict result;
  for (const auto& [name, tensor] : tensors)
    if (!name.starts_with(kAttention)) result[name] = tensor;
  for (const auto& [name, tensor] :
       latent_layer(layer.weights, layer.o_bias, layer.input_norm, scale_, layer.options.pairs(pairs())))
    result[kAttention + name] = tensor;
  return result;
}

CausalLMOptions LatentConversion::options() {
  MultiHeadLatentAttentionOptions latent(1, 1);
  latent.kv_lora_rank(kv_lora_rank_)
      .qk_nope_head_dim(*source_.head_dim())
      .qk_rope_head_dim(rope_dim_)
      .v_head_dim(*source_.head_dim());
  if (source_.bias()) latent.q_lora_rank(source_.embed_dim() + 1);
  auto result = source_;
  result.latent(latent)
      .num_kv_heads(std::nullopt)
      .head_dim(std::nullopt)
      .qk_norm(QkNorm(false))
      .window(std::nullopt)
      .scores(std::nullopt)
      .bias(true)
      .out_bias(std::nullopt)
      .rope_scaling(joined_scaling(rope_, pairs(), source_.rope_base(), source_.max_positions()));
  for (auto& layer : result.layer_settings()) layer.window(std::nullopt);
  return result;
}

at::Tensor with_multipliers(const CausalLMOptions& o, const std::string& name, const at::Tensor& tensor) {
  const auto times = [&](double factor) {
    return factor == 1 ? tensor : (tensor.detach().to(at::kDouble) * factor).to(tensor.scalar_type());
  };
  if (name == "model.embed_tokens.weight") return times(o.embed_scale());
  // A tied head has the factor of the embedding.
  if (name == "model.norm.weight") return times(o.logit_scale() / (o.tie_embeddings() ? o.embed_scale() : 1.0));
  for (const char* end : {".o_proj.weight", ".o_proj.bias", ".down_proj.weight", ".down_proj.bias"})
    if (name.ends_with(end)) return times(o.residual_scale());
  return tensor;
}

}  // namespace attnpack::convert
