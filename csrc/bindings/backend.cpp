#include <attnpack/backend/detail/hooks.h>
#include <attnpack/backend/linear.h>
#include <attnpack/backend/sdpa.h>
#include <attnpack/ops/detail/torch_kernels.h>
#include <bindings/common.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

py::dict as_dict(const ReplacementReport& report) {
  py::dict passed_on;
  for (const auto& [reason, calls] : report.passed_on) passed_on[py::str(reason)] = calls;
  return py::dict(py::arg("taken") = report.taken, py::arg("passed_on") = passed_on);
}

// A function of Python as a hook. Leaked: the process may end after Python.
ChangeHook as_hook(const py::function& changed) {
  const auto* function = new py::function(changed);
  return [function](bool enabled) {
    const py::gil_scoped_acquire gil;
    (*function)(enabled);
  };
}

void set_takes(const py::function& takes) {
  const auto* function = new py::function(takes);
  set_takes_hook([function](at::TensorList tensors) {
    const py::gil_scoped_acquire gil;
    py::tuple given(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i)
      given[i] = tensors[i].defined() ? py::cast(tensors[i]) : py::object(py::none());
    return (*function)(*given).cast<bool>();
  });
}

// enable_<name>, <name>_enabled, <name>_report, reset_<name>_report and set_<name>_hook of one replaceable function.
void define_replacement(py::module_& m, const std::string& name, Replacement (*enable)(), bool (*enabled)(),
                        ReplacementReport (*report)(), void (*reset_report)(), void (*set_hook)(ChangeHook)) {
  m.def(("enable_" + name).c_str(), enable);
  m.def((name + "_enabled").c_str(), enabled);
  m.def((name + "_report").c_str(), [report] { return as_dict(report()); });
  m.def(("reset_" + name + "_report").c_str(), reset_report);
  m.def(("set_" + name + "_hook").c_str(), [set_hook](const py::function& changed) { set_hook(as_hook(changed)); });
}

}  // namespace

void register_backend(py::module_& m) {
  py::class_<Replacement>(m, "Replacement", "Undoes one replacement.")
      .def("disable", &Replacement::disable)
      .def_property_readonly("enabled", &Replacement::enabled);
  define_replacement(m, "sdpa", &enable_sdpa, &sdpa_enabled, &sdpa_report, &reset_sdpa_report, &set_sdpa_hook);
  define_replacement(m, "linear", &enable_linear, &linear_enabled, &linear_report, &reset_linear_report,
                     &set_linear_hook);
  m.def("set_takes_hook", &set_takes);
  m.def("cuda_choice", &describe_cuda_choice);
  m.def("torch_kernel_report", [] {
    py::dict report;
    for (const auto& [name, calls] : torch_kernel_report()) report[py::str(name)] = calls;
    return report;
  });
  m.def("reset_torch_kernel_report", &reset_torch_kernel_report);
}

}  // namespace attnpack
