#pragma once

#include <attnpack/core/check.h>
#include <attnpack/models/causal_lm.h>
#include <bindings/arguments.h>
#include <bindings/option_dicts.h>
#include <bindings/rope_scaling.h>

#include <optional>
#include <set>
#include <string>

namespace attnpack {

// The keywords of MultiHeadLatentAttention that are not the model's.
inline bool is_latent_name(const std::string& name) {
  static const std::set<std::string> names{"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                           "v_head_dim",   "latent_norm", "query_scale",      "path"};
  return names.contains(name);
}

template <>
struct Reader<std::optional<MultiHeadLatentAttentionOptions>> {
  static std::optional<std::optional<MultiHeadLatentAttentionOptions>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<MultiHeadLatentAttentionOptions>();
    if (!py::isinstance<py::dict>(value)) return std::nullopt;
    MultiHeadLatentAttentionOptions result(1, 1);
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value)) {
      const auto name = py::str(key).cast<std::string>();
      ATTNPACK_CHECK(is_latent_name(name) && read_item("latent", name, item, result), "latent: got '", name,
                     "', want keywords of MultiHeadLatentAttention that are not the model's: ranks, head dims, "
                     "latent_norm, query_scale and path");
    }
    return std::make_optional(result);
  }
  static std::string wanted(const std::string&) {
    return "None or a dict such as {'kv_lora_rank': 64, 'qk_nope_head_dim': 32, 'qk_rope_head_dim': 16, "
           "'v_head_dim': 32}";
  }
};

inline py::object to_python(const MultiHeadLatentAttentionOptions& latent) {
  py::dict result;
  MultiHeadLatentAttentionOptions::for_each_option(latent, [&](const char* name, const auto& value) {
    if (is_latent_name(name)) result[name] = to_python(value);
  });
  return result;
}

// The options that keywords of CausalLM give.
inline CausalLMOptions model_options(const py::kwargs& config) {
  return options_of_call<CausalLMOptions, int64_t, int64_t, int64_t, int64_t>("CausalLM", py::args(), config, 5);
}

}  // namespace attnpack
