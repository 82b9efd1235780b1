#pragma once

#include <bindings/common.h>
#include <bindings/rope_scaling.h>

#include <attnpack/core/check.h>
#include <attnpack/models/causal_lm.h>

#include <algorithm>
#include <optional>
#include <string>

// Groups of options that Python gives as one dict.
namespace attnpack {

// "bits, exact_first and exact_last"
inline std::string listed(const Names& names) {
  std::string words;
  for (size_t i = 0; i < names.size(); ++i) words += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  return words;
}

// The dict as Options, which begin as `result`; none for another kind of value. `left_out` are options that the dict
// does not have; `words` say what it does have, where a list of them would not.
template <typename Options>
std::optional<Options> read_dict(const std::string& owner, const py::handle& value, Options result,
                                 const Names& left_out = {}, const std::string& words = "") {
  if (!py::isinstance<py::dict>(value)) return std::nullopt;
  auto taken = option_names(result);
  std::erase_if(taken,
                [&](const auto& name) { return std::find(left_out.begin(), left_out.end(), name) != left_out.end(); });
  for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value)) {
    const auto name = py::str(key).cast<std::string>();
    const bool known = std::find(taken.begin(), taken.end(), name) != taken.end();
    ATTNPACK_CHECK(known && read_item(owner, name, item, result), owner, ": got '", name, "', want ",
                   words.empty() ? listed(taken) : words);
  }
  return result;
}

// All options but those that are left out, as a dict.
template <typename Options>
py::dict dict_without(const Options& options, const Names& left_out) {
  auto result = options_dict(options);
  for (const auto& name : left_out)
    if (result.contains(name)) result.attr("pop")(name);
  return result;
}

template <>
struct Reader<QkNorm> {
  static std::optional<QkNorm> read(const py::handle& value) {
    if (py::isinstance<py::bool_>(value)) return QkNorm(value.cast<bool>());
    return read_dict("qk_norm", value, QkNorm(true), {"on"});
  }
  static std::string wanted(const std::string&) { return "True or False, or a dict such as {'eps': 1e-5}"; }
};

inline py::object to_python(const QkNorm& norm) {
  const auto all = dict_without(norm, {"on"});
  const bool usual = all.equal(dict_without(QkNorm(true), {"on"}));
  return !norm || usual ? py::object(py::bool_(bool(norm))) : py::object(all);
}

template <>
struct Reader<std::optional<QueryScale>> {
  static std::optional<std::optional<QueryScale>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<QueryScale>();
    const auto read = read_dict("query_scale", value, QueryScale(), {},
                                "type with floor_scale and attn_scale, or with llama_4_scaling_beta and "
                                "original_max_position_embeddings");
    return read ? std::make_optional(read) : std::nullopt;
  }
  static std::string wanted(const std::string&) {
    return "None or a dict such as {'type': 'llama4', 'floor_scale': 8192, 'attn_scale': 0.1}";
  }
};

inline py::object to_python(const QueryScale& scale) {
  py::dict result;
  for (const auto& [name, value] : options_dict(scale))
    if (!value.is_none()) result[name] = value;
  return result;
}

template <>
struct Reader<std::optional<ScoreSettings>> {
  static std::optional<std::optional<ScoreSettings>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<ScoreSettings>();
    const auto read = read_dict("scores", value, ScoreSettings());
    return read ? std::make_optional(read) : std::nullopt;
  }
  static std::string wanted(const std::string&) { return "None or a dict such as {'softcap': 50.0}"; }
};

inline const Names kNotOfExperts{"embed_dim", "factory"};

template <>
struct Reader<std::optional<MixtureOfExpertsOptions>> {
  static std::optional<std::optional<MixtureOfExpertsOptions>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<MixtureOfExpertsOptions>();
    const auto read = read_dict("experts", value, MixtureOfExpertsOptions(1, 0, 0, 0), kNotOfExperts,
                                "keywords of MixtureOfExperts that are not the model's");
    return read ? std::make_optional(read) : std::nullopt;
  }
  static std::string wanted(const std::string&) {
    return "None or a dict such as {'hidden_dim': 64, 'num_experts': 8, 'top_k': 2}";
  }
};

inline py::object to_python(const MixtureOfExpertsOptions& experts) { return dict_without(experts, kNotOfExperts); }

template <>
struct Reader<std::optional<RecurrentSettings>> {
  static std::optional<std::optional<RecurrentSettings>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<RecurrentSettings>();
    const auto read = read_dict("recurrent", value, RecurrentSettings());
    return read ? std::make_optional(read) : std::nullopt;
  }
  static std::string wanted(const std::string&) {
    return "None or a dict such as {'kind': 'gated_delta_net', 'head_k_dim': 128}";
  }
};

template <>
struct Reader<std::vector<LayerSettings>> {
  static std::optional<std::vector<LayerSettings>> read(const py::handle& value) {
    std::vector<LayerSettings> layers;
    if (value.is_none()) return layers;
    if (!is_list(value)) return std::nullopt;
    for (const auto& item : py::reinterpret_borrow<py::object>(value)) {
      const auto owner = text_of({"layer_settings[", layers.size(), "]"});
      const auto layer = read_dict(owner, item, LayerSettings());
      if (!layer) return std::nullopt;
      layers.push_back(*layer);
    }
    return layers;
  }
  static std::string wanted(const std::string&) {
    return "None or a list with a dict for each layer, such as {'window': (511, 0)}";
  }
};

template <>
struct Reader<std::optional<TailSettings>> {
  static std::optional<std::optional<TailSettings>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<TailSettings>();
    const auto read = read_dict("tail", value, TailSettings());
    return read ? std::make_optional(read) : std::nullopt;
  }
  static std::string wanted(const std::string&) { return "None or a dict such as {'input_dim': 256}"; }
};

inline py::object to_python(const std::vector<LayerSettings>& layers) {
  py::list result;
  for (const auto& layer : layers) result.append(options_dict(layer));
  return layers.empty() ? py::object(py::none()) : py::object(result);
}

}  // namespace attnpack
