#pragma once

#include <attnpack/models/detail/checkpoint_checks.h>
#include <attnpack/weights/detail/json.h>
#include <bindings/torch_pybind.h>

#include <pybind11/stl/filesystem.h>

#include <filesystem>

namespace attnpack {

// A str, bytes or an os.PathLike: the bytes that the system knows the file by, which need not be UTF-8.
using Path = std::filesystem::path;

// Values of JSON and of metadata as Python's.
inline py::object to_python_value(const Json& json);

struct JsonToPython {
  py::object operator()(std::monostate) const { return py::none(); }
  py::object operator()(const Json::List& list) const {
    py::list result(list.size());
    for (size_t i = 0; i < list.size(); ++i) result[i] = to_python_value(list[i]);
    return result;
  }
  py::object operator()(const Json::Object& object) const {
    py::dict result;
    for (const auto& [name, value] : object) result[py::str(name)] = to_python_value(value);
    return result;
  }
  template <typename T>
  py::object operator()(const T& value) const {
    return py::cast(value);
  }
};

inline py::object to_python_value(const Json& json) { return std::visit(JsonToPython(), json.value); }

inline py::dict as_tuples(const Shapes& shapes) {
  py::dict result;
  for (const auto& [name, shape] : shapes) result[py::str(name)] = py::tuple(py::cast(shape));
  return result;
}

}  // namespace attnpack
