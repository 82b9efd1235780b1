#include <attnpack/weights/detail/gguf_file.h>
#include <bindings/arguments.h>
#include <bindings/checkpoint_values.h>
#include <bindings/register.h>

#include <pybind11/functional.h>

namespace attnpack {

namespace {

py::dict metadata_places_of(const GgufFile& file) {
  py::dict places;
  for (size_t i = 0; i < file.metadata().size(); ++i) {
    const auto& place = file.metadata_places()[i];
    places[py::str(file.metadata()[i].name)] = py::make_tuple(place.begin, place.end);
  }
  return places;
}

// name -> (shape, type, offset, row_bytes), in the order of the file
py::dict tensors_of(const GgufFile& file) {
  py::dict tensors;
  for (const auto& name : file.names()) {
    const auto& tensor = file.tensor(name);
    const py::tuple shape = py::cast(tensor.shape);
    tensors[py::str(name)] = py::make_tuple(shape, tensor.type, tensor.offset, tensor.row_bytes);
  }
  return tensors;
}

void register_gguf_file(py::module_& m) {
  m.attr("LONGEST_GGUF_HEADER") = kLongestGgufHeader;
  m.attr("MOST_GGUF_ITEMS") = kMostGgufItems;
  m.def("padded", &padded);
  // block(type) -> (numbers, bytes) and widen(type, bytes) -> numbers: of the types that C++ does not widen.
  py::class_<GgufFile, std::shared_ptr<GgufFile>>(m, "GgufFile")
      .def(py::init([](const Path& path, decltype(GgufOtherTypes::block) block, decltype(GgufOtherTypes::widen) widen) {
        GgufOtherTypes others{std::move(block), std::move(widen)};
        return without_gil([&] { return std::make_shared<GgufFile>(path, std::move(others)); });
      }))
      .def_property_readonly("metadata", [](const GgufFile& self) { return JsonToPython()(self.metadata()); })
      .def_property_readonly("metadata_places", &metadata_places_of)
      .def_property_readonly("tensors", &tensors_of)
      .def_property_readonly("alignment", &GgufFile::alignment)
      .def("check_model", &GgufFile::check_model)
      .def("blocks", &GgufFile::blocks, py::call_guard<py::gil_scoped_release>())
      .def("read", &GgufFile::read, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void register_gguf(py::module_& m) { register_gguf_file(m); }

}  // namespace attnpack
