#include <attnpack/models/detail/hf_parts.h>

#include <ATen/ATen.h>

#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

namespace attnpack {

namespace {

using at::Tensor;
using Names = std::initializer_list<std::pair<std::string_view, const char*>>;

// "model.layers.3.", "mlp.c_fc", "weight": a name as a layer, a module in it and a parameter.
struct Place {
  std::string layer, module, parameter;
};

Place place_of(const std::string& name, std::string_view prefix) {
  Place place;
  std::string_view rest = name;
  if (rest.substr(0, prefix.size()) == prefix) {
    rest.remove_prefix(prefix.size());
    const auto end = rest.find('.');
    place.layer = "model.layers." + std::string(rest.substr(0, end)) + ".";
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  }
  const auto last = rest.rfind('.');
  place.module = rest.substr(0, last == rest.npos ? 0 : last);
  place.parameter = rest.substr(last == rest.npos ? 0 : last + 1);
  return place;
}

const char* find(const Names& names, std::string_view module) {
  for (const auto& [theirs, ours] : names)
    if (theirs == module) return ours;
  return nullptr;
}

std::vector<HfPart> whole(const std::string& name) { return {{name, nullptr}}; }

std::string joined(const Place& place, const std::string& module) {
  return place.layer + module + "." + place.parameter;
}

// The module by its new name, or the tensor as it is.
std::vector<HfPart> renamed(const std::string& name, const Place& place, const Names& names) {
  const auto* ours = find(names, place.module);
  return whole(ours ? joined(place, ours) : name);
}

// q, k and v, whose rows follow each other.
std::vector<HfPart> rows_of_qkv(const Place& place, const CausalLMOptions& o, bool transposed = false) {
  const auto q = o.num_heads() * *o.head_dim(), kv = *o.num_kv_heads() * *o.head_dim();
  const auto cut = [=](int64_t begin, int64_t length) {
    return [=](const Tensor& x) {
      const Tensor rows = transposed ? x.t() : x;
      TORCH_CHECK_VALUE(rows.size(0) == q + 2 * kv, "it has ", rows.size(0), " rows, want ", q + 2 * kv);
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
      TORCH_CHECK_VALUE(!sizes.empty() && sizes[0] == groups * (each + 2) * dim, "it has ",
                        sizes.empty() ? 0 : sizes[0], " rows, want ", groups * (each + 2) * dim);
      sizes[0] = groups * heads * dim;
      return x.unflatten(0, {groups, each + 2, dim}).narrow(1, begin, heads).reshape(sizes);
    };
  };
  return {{joined(place, "self_attn.q_proj"), cut(0, each)},
          {joined(place, "self_attn.k_proj"), cut(each, 1)},
          {joined(place, "self_attn.v_proj"), cut(each + 1, 1)}};
}

Tensor transposed(const Tensor& x) { return x.t(); }

Tensor half(const Tensor& x, int64_t which) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(0) % 2 == 0, "it has an odd number of rows");
  return x.narrow(0, which * (x.size(0) / 2), x.size(0) / 2);
}

const Names kTopOfGpt2{{"transformer.wte", "model.embed_tokens"},
                       {"transformer.wpe", "model.embed_positions"},
                       {"transformer.ln_f", "model.norm"}};
const Names kLayerOfGpt2{{"ln_1", "input_layernorm"},
                         {"ln_2", "post_attention_layernorm"},
                         {"attn.c_proj", "self_attn.o_proj"},
                         {"mlp.c_fc", "mlp.up_proj"},
                         {"mlp.c_proj", "mlp.down_proj"}};

bool is_mask(const Place& place) {
  return place.module == "attn" && (place.parameter == "bias" || place.parameter == "masked_bias");
}

}  // namespace

std::vector<HfPart> llama_parts(const std::string& name, const CausalLMOptions&) { return whole(name); }

std::vector<HfPart> phi3_parts(const std::string& name, const CausalLMOptions& o) {
  const auto place = place_of(name, "model.layers.");
  if (place.module == "self_attn.qkv_proj") return rows_of_qkv(place, o);
  if (place.module != "mlp.gate_up_proj") return whole(name);
  return {{joined(place, "mlp.gate_proj"), [](const Tensor& x) { return half(x, 0); }},
          {joined(place, "mlp.up_proj"), [](const Tensor& x) { return half(x, 1); }}};
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
      TORCH_CHECK_VALUE(x.dim() > 1 && x.size(0) == count, "it holds other than ", count, " experts");
      const Tensor matrix = is_bias || is_packed ? x.select(0, expert) : x.select(0, expert).t();
      return matrix.slice(0, first, std::nullopt, step);
    };
    parts.push_back({c10::str(place.layer, "mlp.experts.", expert, ".", ours, is_bias ? ".bias" : ".weight"), cut});
  };
  for (int64_t expert = 0; expert < count; ++expert) {
    if (layer == "gate_up_proj") add(expert, "gate_proj", 0, 2), add(expert, "up_proj", 1, 2);
    if (layer == "down_proj") add(expert, "down_proj", 0, 1);
  }
  return parts.empty() ? whole(name) : parts;
}

}  // namespace attnpack
