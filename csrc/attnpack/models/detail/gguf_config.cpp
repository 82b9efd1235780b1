#include <algorithm>
#include <cmath>

#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_settings.h>

namespace attnpack {

namespace {
using Options = CausalLMOptions;

// Settings that change the mathematics and that CausalLM does not have: loading would silently drop them.
const std::vector<std::string> kUnsupportedKeys{"attn_logit_softcapping",
                                                "final_logit_softcapping",
                                                "logit_scale",
                                                "residual_scale",
                                                "embedding_scale",
                                                "attention.scale",
                                                "attention.temperature_scale",
                                                "attention.max_alibi_bias",
                                                "attention.clamp_kqv",
                                                "attention.output_scale",
                                                "attention.relative_buckets_count",
                                                "attention.shared_kv_layers",
                                                "expert_count",
                                                "full_attention_interval",
                                                "nextn_predict_layers",
                                                "rope.dimension_sections",
                                                "router_logit_softcapping",
                                                "swiglu_clamp_exp",
                                                "swiglu_clamp_shexp",
                                                "swin_norm",
                                                "use_parallel_residual"};
// Widths of a head that must be head_dim.
constexpr const char* kWidths[] = {"attention.value_length", "attention.key_length_swa", "attention.value_length_swa",
                                   "rope.dimension_count", "rope.dimension_count_swa"};

// The heads of keys; where layers differ in them, the most of a layer.
int64_t num_kv_heads(const GgufSettings& file, const GgufFamily& family, int64_t num_layers, int64_t num_heads) {
  const auto* key = "attention.head_count_kv";
  if (!file.is_list(key)) return file.size(key, num_heads);
  check_equal_heads(file, key, family.listed.count(key));
  const auto counts = file.by_layer(key, num_layers, std::nullopt, 0);
  const auto most = *std::max_element(counts.begin(), counts.end());
  check_equal_heads(file, key, most >= 1);
  return most;
}

// The width inside the feed-forwards; where layers differ in it, that of the first. A file of only experts may lack it.
int64_t hidden_dim(const GgufSettings& file, const GgufFamily& family, int64_t num_layers) {
  const std::string key = "feed_forward_length";
  if (family.listed.count(key) && file.is_list(key)) return file.by_layer(key, num_layers)[0];
  const auto* of_experts = "expert_feed_forward_length";
  return file.has(key) || !file.has(of_experts) ? file.size(key) : file.size(of_experts);
}

// The window of every layer: {W - 1, 0} for a sliding_window of W tokens, the token itself included.
std::optional<Window> window_of_all(const GgufSettings& file, int64_t positions) {
  const auto* key = "attention.sliding_window";
  if (!file.is_set(key)) return std::nullopt;
  const auto& value = file.get(key);
  const auto* width = value.as<int64_t>();
  file.check(width && *width >= 1, file.full(key), " is ", quoted(value), ", wants an int of at least 1 for all layers",
             kOtherModel);
  if (!file.has("attention.sliding_window_pattern")) return Window{*width - 1, 0};
  file.check(*width >= positions, file.full(key), " is ", *width,
             " in some layers only, which is not supported yet, and shorter than the context of ", positions,
             "; pass max_positions=", *width, " or less");
  return std::nullopt;
}

void check_usual(const GgufSettings& file, const GgufFamily& family, int64_t head_dim) {
  file.check(file.is_usual("attention.causal", true), file.full("attention.causal"), " is ",
             quoted(file.get("attention.causal")), ", wants True: every token sees only those before it here",
             kOtherModel);
  for (const char* key : kWidths) {
    if (family.settings.count(key)) continue;
    check_width(file, key, "head_dim", head_dim);
  }
}

// The widest head, for which RoPE holds a number per pair of dims.
int64_t widest_head(const Options& o) {
  if (const auto& latent = o.latent())
    return std::max<int64_t>(*latent->qk_nope_head_dim(), 0) + *latent->qk_rope_head_dim() + *latent->v_head_dim();
  auto widest = std::max(*o.head_dim(), o.scores().value_or(ScoreSettings()).rope_dim().value_or(0));
  for (const auto& layer : o.layer_settings()) widest = std::max(widest, layer.head_dim().value_or(0));
  return widest;
}

}  // namespace

const GgufFamilies& gguf_families() {
  static const GgufFamilies all = [] {
    auto families = gguf_older_families();
    for (const auto& more :
         {gguf_newer_families(), gguf_mixture_families(), GgufFamilies{gguf_gemma4()}, gguf_hybrid_families()})
      families.insert(families.end(), more.begin(), more.end());
    return families;
  }();
  return all;
}

const GgufFamily& gguf_family(const GgufSettings& file) {
  std::string names;
  for (const auto& family : gguf_families()) {
    if (family.architecture == file.architecture()) return family;
    (names += names.empty() ? "" : ", ") += family.architecture;
  }
  const auto* given = file.file().find("general.architecture");
  TORCH_CHECK_VALUE(false, text_of({file.path(), ": architecture ", quoted(given ? *given : Json()),
                                    " is not supported; from_gguf reads ", names}));
}

int64_t further_layers(const GgufSettings& file, const GgufFamily& family) {
  const std::string key = "nextn_predict_layers";
  if (!family.settings.count(key) || !file.is_set(key)) return 0;
  const auto count = file.size(key), all = file.size("block_count");
  file.check(count < all, file.full(key), " is ", count, ", wants less than block_count, ", all, kDamaged);
  return count;
}

void check_equal_heads(const GgufSettings& file, const char* key, bool are_equal) {
  file.check(are_equal, file.full(key), " is ", quoted(file.get(key)),
             ", wants one number above 0 for all layers with attention: head counts that differ from layer to layer "
             "are not supported",
             kOtherModel);
}

void check_width(const GgufSettings& file, const char* key, const char* other, int64_t width) {
  const auto& value = file.get(key);
  file.check(value.is_null() || number_in(value) == static_cast<double>(width), file.full(key), " is ", quoted(value),
             ", wants ", width, ", which is ", other, ": models where they differ are not supported", kOtherModel);
}

int64_t width_of_head(const GgufSettings& file) {
  const auto* key = "attention.key_length";
  if (file.has(key)) return file.size(key);
  const auto all = file.size("embedding_length"), heads = file.size("attention.head_count");
  file.check(all >= heads, file.full("embedding_length"), " is ", all, ", wants at least one dim for each of the ",
             file.full("attention.head_count"), " = ", heads, " heads, because ", file.full(key), " is absent",
             kDamaged);
  return all / heads;
}

GgufSizes gguf_sizes(const GgufSettings& file, const GgufFamily& family) {
  for (const auto& key : kUnsupportedKeys)
    if (!family.settings.count(key)) file.refuse({key});
  check_equal_heads(file, "attention.head_count", !file.is_list("attention.head_count"));
  GgufSizes sizes{};
  sizes.embed_dim = file.size("embedding_length");
  sizes.num_heads = file.size("attention.head_count");
  sizes.num_layers = file.size("block_count") - further_layers(file, family);
  const auto num_tensors = file.file().tensors().size();
  check_sizes(file.path(), num_tensors, sizes.num_layers, 1, 1);  // before there is a list with one for each layer
  sizes.num_kv_heads = num_kv_heads(file, family, sizes.num_layers, sizes.num_heads);
  sizes.head_dim = width_of_head(file);
  check_sizes(file.path(), num_tensors, sizes.num_layers, std::max(sizes.num_heads, sizes.num_kv_heads),
              sizes.head_dim);
  return sizes;
}

CausalLMOptions gguf_options(const GgufSettings& file, const GgufFamily& family, const GgufSizes& sizes,
                             std::optional<int64_t> max_positions) {
  check_usual(file, family, sizes.head_dim);
  const auto& shapes = file.shapes();
  const auto rows = [&](const std::string& name, int64_t usual) {
    const auto found = shapes.find(name);
    return found == shapes.end() ? usual : static_cast<int64_t>(found->second.at(0));
  };
  // The first layer with attention.
  std::string first = "model.layers.0.";
  const std::string queries = "self_attn.q_proj.weight";
  const auto attends =
      std::find_if(shapes.begin(), shapes.end(), [&](const auto& item) { return item.first.ends_with(queries); });
  if (attends != shapes.end()) first = attends->first.substr(0, attends->first.size() - queries.size());

  const auto context = file.size("context_length");
  const auto positions = max_positions ? std::min(context, *max_positions) : context;
  const auto base = file.number("rope.freq_base", 10000);
  if (!family.settings.count("rope.freq_base_swa")) file.refuse({"rope.freq_base_swa"}, {base});
  const auto eps = file.number(family.layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon");
  auto options = Options(rows("model.embed_tokens.weight", 0), sizes.embed_dim, sizes.num_layers, sizes.num_heads)
                     .num_kv_heads(sizes.num_kv_heads)
                     .head_dim(sizes.head_dim)
                     .hidden_dim(hidden_dim(file, family, sizes.num_layers))
                     .max_positions(positions)
                     .rope_base(base)
                     .rope_scaling(gguf_rope_scaling(file, family, sizes.head_dim))
                     .eps(eps)
                     .norm(family.layer_norm ? "layer" : "rms")
                     .tie_embeddings(!file.has_shape("lm_head.weight"))
                     .window(family.windows ? std::nullopt : window_of_all(file, positions))
                     .qk_norm(file.has_shape(first + "self_attn.q_norm.weight") ? QkNorm(true).eps(eps) : QkNorm(false))
                     .bias(file.has_shape(first + "self_attn.q_proj.bias"))
                     .out_bias(file.has_shape(first + "self_attn.o_proj.bias"))
                     .mlp_bias(file.has_shape(first + "mlp.up_proj.bias"));
  if (family.configure) family.configure(file, options);
  if (options.position_embedding() == "learned" && max_positions)
    options.max_positions(rows("model.embed_positions.weight", positions));
  check_sizes(file.path(), file.file().tensors().size(), sizes.num_layers, 1, widest_head(options));
  return options;
}

}  // namespace attnpack
