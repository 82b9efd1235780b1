#pragma once

#include <attnpack/bindings/torch_pybind.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/rotary_embedding.h>

#include <optional>

namespace attnpack {

// The dict of Hugging Face configs ("rope_type" or "type", "factor", "original_max_position_embeddings"), or None.
// "rope_theta" in it is ignored: the base is an argument of its own.
inline std::optional<RopeScaling> parse_scaling(const py::object& scaling) {
  if (scaling.is_none()) return std::nullopt;
  TORCH_CHECK_TYPE(py::isinstance<py::dict>(scaling), "scaling: got ",
                   py::str(py::type::of(scaling)).cast<std::string>(),
                   ", want None or a dict such as {'rope_type': 'linear', 'factor': 2.0}");
  const py::dict dict = scaling;
  RopeScaling result;
  for (const char* key : {"type", "rope_type"}) {
    if (dict.contains(key)) result.rope_type(dict[key].cast<std::string>());
  }
  if (dict.contains("factor")) result.factor(dict["factor"].cast<double>());
  ATTNPACK_CHECK(result.rope_type() == "default" || dict.contains("factor"), "scaling: rope_type '", result.rope_type(),
                 "' needs 'factor'");
  if (dict.contains("original_max_position_embeddings")) {
    result.original_max_position_embeddings(dict["original_max_position_embeddings"].cast<int64_t>());
  }
  return result;
}

}  // namespace attnpack
