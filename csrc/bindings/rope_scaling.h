#pragma once

#include <bindings/common.h>

#include <attnpack/core/check.h>
#include <attnpack/rope/scaling.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace attnpack {

// The dict of Hugging Face configs, as in RopeScaling, or None. A value of None counts as left out.
inline std::optional<RopeScaling> parse_scaling(const py::object& scaling) {
  if (scaling.is_none()) return std::nullopt;
  TORCH_CHECK_TYPE(py::isinstance<py::dict>(scaling), "attnpack: scaling is ", shown(scaling),
                   ", wants None or a dict such as {'rope_type': 'linear', 'factor': 2.0}");
  const py::dict dict = scaling;
  const auto read = [&](const char* key, auto value, const char* wanted) {
    const py::object held = dict[key];
    py::detail::make_caster<decltype(value)> caster;
    TORCH_CHECK_TYPE(!py::isinstance<py::bool_>(held) && caster.load(held, /*convert=*/true),
                     "attnpack: scaling: ", key, " is ", shown(held), ", wants ", wanted);
    return py::detail::cast_op<decltype(value)>(caster);
  };
  RopeScaling result;
  const auto word = [&](const char* key) { return read(key, std::string(), "a word such as 'linear'"); };
  const auto number = [&](const char* key) { return read(key, double(), "a number"); };
  const auto numbers = [&](const char* key) { return read(key, std::vector<double>(), "a list of numbers"); };
  std::map<std::string, std::function<void(const char*)>> known{
      {"type",
       [&](auto key) {
         const auto type = word(key),
                    kind = dict.contains("rope_type") && !dict["rope_type"].is_none() ? word("rope_type") : type;
         ATTNPACK_CHECK(type == kind, "scaling: got rope_type '", kind, "' and type '", type,
                        "', leave one of them out");
         result.rope_type(type);
       }},
      {"rope_type", [&](auto key) { result.rope_type(word(key)); }},
      {"factor", [&](auto key) { result.factor(number(key)); }},
      {"original_max_position_embeddings",
       [&](auto key) { result.original_max_position_embeddings(read(key, int64_t(), "an int")); }},
      {"attention_factor", [&](auto key) { result.attention_factor(number(key)); }},
      {"beta_fast", [&](auto key) { result.beta_fast(number(key)); }},
      {"beta_slow", [&](auto key) { result.beta_slow(number(key)); }},
      {"mscale", [&](auto key) { result.mscale(number(key)); }},
      {"mscale_all_dim", [&](auto key) { result.mscale_all_dim(number(key)); }},
      {"low_freq_factor", [&](auto key) { result.low_freq_factor(number(key)); }},
      {"high_freq_factor", [&](auto key) { result.high_freq_factor(number(key)); }},
      {"short_factor", [&](auto key) { result.short_factor(numbers(key)); }},
      {"long_factor", [&](auto key) { result.long_factor(numbers(key)); }},
      {"truncate",
       [&](auto key) {
         TORCH_CHECK_TYPE(py::isinstance<py::bool_>(dict[key]), "attnpack: scaling: truncate is ", shown(dict[key]),
                          ", wants True or False");
         result.truncate(dict[key].template cast<bool>());
       }},
      // Ignored here: base and dim are arguments of their own.
      {"rope_theta", [](auto) {}},
      {"partial_rotary_factor", [](auto) {}},
      {"finetuned", [](auto) {}},
  };
  for (const auto& [key, value] : dict) {
    const auto name = py::str(key).cast<std::string>();
    const auto set = known.find(name);
    ATTNPACK_CHECK(set != known.end(), "scaling: got '", name,
                   "', which no rope_type here knows; leave it out, or see the docstring of RotaryEmbedding");
    if (!value.is_none()) set->second(name.c_str());
  }
  return result;
}

}  // namespace attnpack
