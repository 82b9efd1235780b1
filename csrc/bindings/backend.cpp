#include <attnpack/backend/detail/hooks.h>
#include <attnpack/backend/sdpa.h>
#include <bindings/common.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

py::dict report_py() {
  const ReplacementReport report = sdpa_report();
  py::dict passed_on;
  for (const auto& [reason, calls] : report.passed_on) passed_on[py::str(reason)] = calls;
  return py::dict(py::arg("taken") = report.taken, py::arg("passed_on") = passed_on);
}

void set_hooks(const py::function& changed, const py::function& takes) {
  // Leaked: the process may end after Python.
  const auto* held = new std::pair<py::function, py::function>(changed, takes);
  set_sdpa_hooks(
      {[held](bool enabled) {
         const py::gil_scoped_acquire gil;
         held->first(enabled);
       },
       [held](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask) {
         const py::gil_scoped_acquire gil;
         return held->second(query, key, value, mask.defined() ? py::cast(mask) : py::none()).cast<bool>();
       }});
}

}  // namespace

void register_backend(py::module_& m) {
  py::class_<Replacement>(m, "Replacement", "Undoes one replacement.")
      .def("disable", &Replacement::disable)
      .def_property_readonly("enabled", &Replacement::enabled);
  m.def("enable_sdpa", &enable_sdpa);
  m.def("sdpa_enabled", &sdpa_enabled);
  m.def("sdpa_report", &report_py);
  m.def("reset_sdpa_report", &reset_sdpa_report);
  m.def("set_hooks", &set_hooks);
}

}  // namespace attnpack
