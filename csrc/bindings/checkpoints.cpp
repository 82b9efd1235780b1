#include <attnpack/models/detail/hf_checkpoint.h>
#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/from_hf.h>
#include <attnpack/weights/detail/safetensors_writer.h>
#include <attnpack/weights/detail/shards.h>
#include <attnpack/weights/detail/utf8.h>
#include <attnpack/weights/safetensors.h>
#include <bindings/causal_lm_options.h>
#include <bindings/checkpoint_values.h>
#include <bindings/register.h>

#include <cerrno>

namespace attnpack {

namespace {

// Calls `call`, and raises an error of the system as Python's OSError with `path`.
template <typename Call>
auto with_os_errors(const std::string& path, const Call& call) {
  try {
    return call();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
  }
}

// Python's str of a path shows bytes that are no UTF-8 as half characters, and so do sentences that name it.
void translate_path_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const c10::ValueError& refusal) {
    const std::string words = refusal.what_without_backtrace();
    if (is_utf8(words)) throw;
    const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefaultAndSize(words.data(), words.size()));
    PyErr_SetObject(PyExc_ValueError, text.ptr());
  }
}

py::dict shapes_of(const SafetensorsFile& file) {
  Shapes shapes;
  for (const auto& [name, tensor] : file.tensors()) shapes[name] = tensor.shape;
  return as_tuples(shapes);
}

// config: keywords of CausalLM.
py::dict check_checkpoint_tensors_py(const Path& path, const Shapes& shapes, const py::kwargs& config) {
  return as_tuples(check_checkpoint_tensors(path, shapes, model_options(config)));
}

std::vector<std::string> model_types() {
  std::vector<std::string> names;
  for (const auto& family : hf_families()) names.emplace_back(family.model_type);
  return names;
}

// A writer that knows its path, for the errors of the system.
struct PathWriter {
  std::string path;
  SafetensorsWriter writer;

  static std::unique_ptr<PathWriter> make(const Path& path, const py::dict& tensors) {
    std::vector<AnnouncedTensor> announced;
    for (const auto& [name, described] : tensors) {
      const auto [shape, dtype] = described.cast<std::pair<std::vector<int64_t>, at::ScalarType>>();
      announced.push_back({name.cast<std::string>(), shape, dtype});
    }
    return with_os_errors(path, [&] {
      return std::unique_ptr<PathWriter>(new PathWriter{path, SafetensorsWriter(path, announced, {{"format", "pt"}})});
    });
  }
};

void register_hf(py::module_& m) {
  m.attr("MODEL_TYPES") = py::tuple(py::cast(model_types()));
  py::class_<HfCheckpoint>(m, "HfCheckpoint")
      .def(py::init([](const Path& directory, std::optional<int64_t> max_positions) {
        return without_gil([&] { return std::make_unique<HfCheckpoint>(directory, max_positions); });
      }))
      .def_property_readonly("config", [](const HfCheckpoint& self) { return options_dict(self.options()); })
      .def_property_readonly("shapes", [](const HfCheckpoint& self) { return as_tuples(self.shapes()); })
      .def_property_readonly("is_plain", &HfCheckpoint::is_plain)
      .def("dtype", &HfCheckpoint::dtype)
      .def("read", &HfCheckpoint::read, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("files", &HfCheckpoint::files_by_name);
  m.def("causal_lm_from_hf", [](const Path& directory, at::ScalarType dtype, std::optional<int64_t> positions) {
    const auto options = FromHfOptions().dtype(dtype).max_positions(positions);
    return without_gil([&] { return causal_lm_from_hf(directory, options).ptr(); });
  });
  m.def("check_sizes", &check_sizes);
  m.def("check_checkpoint_tensors", &check_checkpoint_tensors_py);
}

}  // namespace

void register_checkpoints(py::module_& m) {
  py::register_local_exception_translator(&translate_path_error);
  register_hf(m);
  register_gguf(m);
  register_gguf_model(m);
  m.attr("LONGEST_JSON") = kLongestJson;
  m.attr("MOST_EXPERTS") = kMostExperts;
  m.def(
      "parse_json", [](std::string_view text, int64_t most) { return to_python_value(parse_json(text, most)); },
      py::arg("text"), py::arg("most") = kMostJsonMarks);
  m.def("check_json_values", &check_json_values, py::arg("text"), py::arg("most") = kMostJsonMarks);
  m.def("read_json", [](const Path& path) { return to_python_value(read_json_file(path)); });

  py::class_<SafetensorsFile, std::shared_ptr<SafetensorsFile>>(m, "SafetensorsFile")
      .def(py::init(
          [](const Path& path) { return without_gil([&] { return std::make_shared<SafetensorsFile>(path); }); }))
      .def_property_readonly("path", [](const SafetensorsFile& self) { return Path(self.path()); })
      .def_property_readonly("shapes", &shapes_of)
      .def("dtype", &SafetensorsFile::weight_dtype)
      .def("read", &SafetensorsFile::read, py::call_guard<py::gil_scoped_release>());
  m.def("open_safetensors",
        [](const Path& directory) { return without_gil([&] { return open_safetensors(directory); }); });
  m.def("load_safetensors", [](const Path& path) { return without_gil([&] { return load_safetensors(path); }); });
  m.def("save_safetensors",
        [](const StateDict& tensors, const Path& path, const std::map<std::string, std::string>& metadata) {
          without_gil([&] { save_safetensors(tensors, path, metadata); });
        });

  py::class_<PathWriter>(m, "SafetensorsWriter")
      .def(py::init(&PathWriter::make))
      .def_property_readonly("size", [](const PathWriter& self) { return self.writer.size(); })
      .def("write_tensor",
           [](PathWriter& self, const std::string& name, const at::Tensor& tensor) {
             with_os_errors(self.path, [&] { without_gil([&] { self.writer.write_tensor(name, tensor); }); });
           })
      .def("close", [](PathWriter& self) { with_os_errors(self.path, [&] { self.writer.close(); }); });
}

}  // namespace attnpack
