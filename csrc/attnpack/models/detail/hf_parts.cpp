#include <attnpack/models/detail/hf_parts.h>

#include <ATen/ATen.h>

#include <attnpack/models/detail/hf_places.h>
#include <attnpack/weights/detail/file_errors.h>

#include <optional>

namespace attnpack {

namespace {

using at::Tensor;
using Names = HfNames;
using Place = HfPlace;

// q, k and v, whose rows follow each other.
std::vector<HfPart> rows_of_qkv(const Place& place, const CausalLMOptions& o, bool transposed = false) {
  const auto q = o.num_heads() * *o.head_dim(), kv = *o.num_kv_heads() * *o.head_dim();
  const auto cut = [=](int64_t begin, int64_t length) {
    return [=](const Tensor& x) {
      const Tensor rows = transposed ? x.t() : x;
      refuse_unless(rows.size(0) == q + 2 * kv, "it has ", rows.size(0), " rows, want ", q + 2 * kv);
      return rows.narrow(0, begin, length);
    };
  };
  return {{joined(place, "self_attn.q_proj"), cut(0, q)},
          {joined(place, "self_attn.k_proj"), cut(q, kv)},
          {joined(place, "self_attn.v_proj"), cut(q + kv, kv)}};
}

// The same where each group of query heads is followed by its kv head: q ... q k v.
std::vector<HfPart> groups_of_qkv(const Place& place, const CausalLMOptions& o) {
  const auto groups = *o.num_kv_heads(), each = o.num_heads() / groups, dim = *o.head_dim();
  const auto cut = [=](int64_t begin, int64_t heads) {
    return [=](const Tensor& x) {
      auto sizes = x.sizes().vec();
      refuse_unless(!sizes.empty() && sizes[0] == groups * (each + 2) * dim, "it has ", sizes.empty() ? 0 : sizes[0],
                    " rows, want ", groups * (each + 2) * dim);
      sizes[0] = groups * heads * dim;
      return x.unflatten(0, {groups, each + 2, dim}).narrow(1, begin, heads).reshape(sizes);
    };
  };
  return {{joined(place, "self_attn.q_proj"), cut(0, each)},
          {joined(place, "self_attn.k_proj"), cut(each, 1)},
          {joined(place, "self_attn.v_proj"), cut(each + 1, 1)}};
}

Tensor transposed(const Tensor& x) { return x.t(); }

const Names kTopOfGpt2{{"transformer.wte", "model.embed_tokens"},
                       {"transformer.wpe", "model.embed_positions"},
                       {"transformer.ln_f", "model.norm"}};
const Names kLayerOfGpt2{{"ln_1", "input_layernorm"},
                         {"ln_2", "post_attention_layernorm"},
                         {"attn.c_proj", "self_attn.o_proj"},
                         {"mlp.c_fc", "mlp.up_proj"},
                         {"mlp.c_proj", "mlp.down_proj"}};

bool is_mask(const Place& place, const char* attention = "attn") {
  return place.module == attention && (place.parameter == "bias" || place.parameter == "masked_bias");
}

}  // namespace

std::vector<HfPart> llama_parts(const std::string& name, const CausalLMOptions&) { return whole(name); }

std::vector<HfPart> phi3_parts(const std::string& name, const CausalLMOptions& o) {
  const auto place = place_of(name, "model.layers.");
  if (place.module == "self_attn.qkv_proj") return rows_of_qkv(place, o);
  return place.module == "mlp.gate_up_proj" ? gate_and_up(place, "mlp.") : whole(name);
}

std::vector<HfPart> glm4_parts(const std::string& name, const CausalLMOptions&) {
  static const Names names{{"post_self_attn_layernorm", "post_attention_layernorm"},
                           {"post_attention_layernorm", "pre_feedforward_layernorm"},
                           {"post_mlp_layernorm", "post_feedforward_layernorm"}};
  const auto place = place_of(name, "model.layers.");
  return place.module == "mlp.gate_up_proj" ? gate_and_up(place, "mlp.") : renamed(name, place, names);
}

std::vector<HfPart> hunyuan_parts(const std::string& name, const CausalLMOptions&) {
  static const Names names{{"self_attn.query_layernorm", "self_attn.q_norm"},
                           {"self_attn.key_layernorm", "self_attn.k_norm"}};
  return renamed(name, place_of(name, "model.layers."), names);
}

std::vector<HfPart> phi_parts(const std::string& name, const CausalLMOptions&) {
  static const Names names{{"self_attn.dense", "self_attn.o_proj"},
                           {"mlp.fc1", "mlp.up_proj"},
                           {"mlp.fc2", "mlp.down_proj"},
                           {"model.final_layernorm", "model.norm"}};
  return renamed(name, place_of(name, "model.layers."), names);
}

std::vector<HfPart> starcoder2_parts(const std::string& name, const CausalLMOptions&) {
  static const Names names{{"mlp.c_fc", "mlp.up_proj"}, {"mlp.c_proj", "mlp.down_proj"}};
  return renamed(name, place_of(name, "model.layers."), names);
}

// Its linear layers hold their weights as [in, out].
std::vector<HfPart> gpt2_parts(const std::string& name, const CausalLMOptions& o) {
  const auto place = place_of(name, "transformer.h.");
  if (place.layer.empty()) return renamed(name, place, kTopOfGpt2);
  if (is_mask(place)) return {};
  const bool matrix = place.parameter == "weight";
  if (place.module == "attn.c_attn") return rows_of_qkv(place, o, matrix);
  auto parts = renamed(name, place, kLayerOfGpt2);
  if (matrix && (place.module.rfind("attn.", 0) == 0 || place.module.rfind("mlp.", 0) == 0)) parts[0].cut = transposed;
  return parts;
}

std::vector<HfPart> gpt_bigcode_parts(const std::string& name, const CausalLMOptions& o) {
  const auto place = place_of(name, "transformer.h.");
  if (place.layer.empty()) return renamed(name, place, kTopOfGpt2);
  if (is_mask(place)) return {};
  if (place.module == "attn.c_attn") return *o.num_kv_heads() == 1 ? rows_of_qkv(place, o) : groups_of_qkv(place, o);
  return renamed(name, place, kLayerOfGpt2);
}

std::vector<HfPart> falcon_parts(const std::string& name, const CausalLMOptions& o) {
  static const Names top{{"transformer.word_embeddings", "model.embed_tokens"}, {"transformer.ln_f", "model.norm"}};
  static const Names in_layer{{"self_attention.dense", "self_attn.o_proj"},
                              {"input_layernorm", "input_layernorm"},
                              {"post_attention_layernorm", "post_attention_layernorm"},
                              {"ln_attn", "input_layernorm"},
                              {"ln_mlp", "post_attention_layernorm"},
                              {"mlp.dense_h_to_4h", "mlp.up_proj"},
                              {"mlp.dense_4h_to_h", "mlp.down_proj"}};
  const auto place = place_of(name, "transformer.h.");
  if (place.layer.empty()) return renamed(name, place, top);
  if (place.module == "self_attention.query_key_value") return groups_of_qkv(place, o);
  return renamed(name, place, in_layer);
}

std::vector<HfPart> gpt_neox_parts(const std::string& name, const CausalLMOptions& o) {
  static const Names top{{"gpt_neox.embed_in", "model.embed_tokens"},
                         {"gpt_neox.final_layer_norm", "model.norm"},
                         {"embed_out", "lm_head"}};
  static const Names in_layer{{"attention.dense", "self_attn.o_proj"},
                              {"input_layernorm", "input_layernorm"},
                              {"post_attention_layernorm", "post_attention_layernorm"},
                              {"mlp.dense_h_to_4h", "mlp.up_proj"},
                              {"mlp.dense_4h_to_h", "mlp.down_proj"}};
  const auto place = place_of(name, "gpt_neox.layers.");
  if (place.layer.empty()) return renamed(name, place, top);
  if (is_mask(place, "attention")) return {};
  if (place.module == "attention.query_key_value") return groups_of_qkv(place, o);
  return renamed(name, place, in_layer);
}

// Experts are stored together: gate_up_proj [experts, E, 2 * hidden] with gate and up in turns, down_proj [experts,
// hidden, E], and their biases. As blocks of MXFP4 they are [experts, out, in / 32, 16].
std::vector<HfPart> gpt_oss_parts(const std::string& name, const CausalLMOptions& o) {
  const auto place = place_of(name, "model.layers.");
  if (place.module == "mlp.router") return whole(joined(place, "mlp.gate"));
  if (place.module != "mlp.experts") return whole(name);
  const auto is_bias = place.parameter.ends_with("_bias"), is_packed = place.parameter.ends_with("_blocks");
  const auto layer = is_bias || is_packed ? place.parameter.substr(0, place.parameter.rfind('_')) : place.parameter;
  const auto count = o.experts()->num_experts();
  std::vector<HfPart> parts;
  const auto add = [&](int64_t expert, const char* ours, int64_t first, int64_t step) {
    const auto cut = [=](const Tensor& x) {
      refuse_unless(x.dim() > 1 && x.size(0) == count, "it holds other than ", count, " experts");
      const Tensor matrix = is_bias || is_packed ? x.select(0, expert) : x.select(0, expert).t();
      return matrix.slice(0, first, std::nullopt, step);
    };
    parts.push_back({text_of({place.layer, "mlp.experts.", expert, ".", ours, is_bias ? ".bias" : ".weight"}), cut});
  };
  for (int64_t expert = 0; expert < count; ++expert) {
    if (layer == "gate_up_proj") add(expert, "gate_proj", 0, 2), add(expert, "up_proj", 1, 2);
    if (layer == "down_proj") add(expert, "down_proj", 0, 1);
  }
  return parts.empty() ? whole(name) : parts;
}

}  // namespace attnpack
