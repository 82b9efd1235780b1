#include <attnpack/models/detail/gguf_checkpoint.h>
#include <attnpack/models/detail/load.h>
#include <attnpack/models/from_gguf.h>
#include <bindings/causal_lm_options.h>
#include <bindings/checkpoint_values.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

std::vector<std::string> architectures() {
  std::vector<std::string> names;
  for (const auto& family : gguf_families()) names.push_back(family.architecture);
  return names;
}

}  // namespace

void register_gguf_model(py::module_& m) {
  m.attr("ARCHITECTURES") = py::tuple(py::cast(architectures()));
  py::class_<GgufCheckpoint>(m, "GgufCheckpoint")
      .def(py::init([](const std::shared_ptr<GgufFile>& file, std::optional<int64_t> max_positions) {
        return without_gil([&] { return std::make_unique<GgufCheckpoint>(file, max_positions); });
      }))
      .def_property_readonly("architecture", &GgufCheckpoint::architecture)
      .def_property_readonly("config", [](const GgufCheckpoint& self) { return options_dict(self.options()); })
      .def_property_readonly("shapes", [](const GgufCheckpoint& self) { return as_tuples(self.shapes()); })
      .def("read", &GgufCheckpoint::read, py::call_guard<py::gil_scoped_release>())
      .def("blocks", &GgufCheckpoint::blocks, py::call_guard<py::gil_scoped_release>());
  m.def("may_be_stored", &may_be_stored);
  m.def("causal_lm_from_gguf",
        [](const Path& path, at::ScalarType dtype, std::optional<int64_t> positions, const std::string& weights) {
          const auto options = GgufOptions().dtype(dtype).max_positions(positions).weights(weights);
          return without_gil([&] { return causal_lm_from_gguf(path, options).ptr(); });
        });
}

}  // namespace attnpack
