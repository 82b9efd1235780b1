#pragma once

#include <attnpack/bindings/common.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/rotary_embedding.h>

#include <optional>

namespace attnpack {

// The dict of Hugging Face configs ("rope_type" or "type", "factor", "original_max_position_embeddings"), or None.
// "rope_theta" in it is ignored: the base is an argument of its own.
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
  for (const char* key : {"type", "rope_type"}) {
    if (dict.contains(key)) result.rope_type(read(key, std::string(), "a word such as 'linear'"));
  }
  if (dict.contains("factor")) result.factor(read("factor", double(), "a number"));
  ATTNPACK_CHECK(result.rope_type() == "default" || dict.contains("factor"), "scaling: rope_type '", result.rope_type(),
                 "' needs 'factor'");
  if (dict.contains("original_max_position_embeddings")) {
    result.original_max_position_embeddings(read("original_max_position_embeddings", int64_t(), "an int"));
  }
  return result;
}

}  // namespace attnpack
