#pragma once

#include <bindings/torch_pybind.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/state_dict.h>

#include <optional>
#include <string>

namespace attnpack {

using OptionalTensor = std::optional<at::Tensor>;

// device and dtype as torch's own modules take them; None asks torch, so that `with torch.device(...)` is honoured.
Factory make_factory(const py::object& device, const py::object& dtype);

// The arguments of module.to(...): a dtype, a device or its name, in any order.
Factory parse_to(const py::args& args, const py::kwargs& kwargs);

// A wrong argument as an error message shows it: `'yes' (str)`; of a module or tensor the type alone, because its text
// is long.
std::string shown(const py::object& argument);

template <typename Impl>
std::string describe(const Impl& module) {
  return c10::str(static_cast<const torch::nn::Module&>(module));
}

// Binds what every module can do. The rest comes from torch's own binding of torch::nn::Module.
template <typename Impl>
py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> bind_module(py::module_& m, const char* name,
                                                                       const char* doc) {
  py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> cls(m, name, doc);
  cls.def("named_parameters",
          [](Impl& self) {
            py::list pairs;
            for (const auto& item : self.named_parameters()) pairs.append(py::make_tuple(item.key(), item.value()));
            return pairs;
          })
      .def("state_dict", [](Impl& self) { return state_dict(self); })
      .def(
          "load_state_dict",
          [](Impl& self, const StateDict& tensors, bool strict) {
            auto result = load_state_dict(self, tensors, strict);
            return py::make_tuple(result.missing, result.unexpected);
          },
          py::arg("state_dict"), py::arg("strict") = true)
      .def(
          "assign_state_dict",
          [](Impl& self, const StateDict& tensors, bool strict) {
            auto result = assign_state_dict(self, tensors, strict);
            return py::make_tuple(result.missing, result.unexpected);
          },
          py::arg("state_dict"), py::arg("strict") = true,
          "Puts the tensors themselves in place of the parameters: both sides share storage and gradients.")
      .def(
          "train",
          [](std::shared_ptr<Impl> self, bool mode) {
            self->train(mode);
            return self;
          },
          py::arg("mode") = true)
      .def("eval",
           [](std::shared_ptr<Impl> self) {
             self->eval();
             return self;
           })
      .def("to",
           [](std::shared_ptr<Impl> self, const py::args& args, const py::kwargs& kwargs) {
             const auto target = parse_to(args, kwargs);
             if (target.dtype) self->to(*target.dtype);
             if (target.device) self->to(*target.device);
             return self;
           })
      .def("clone", [](Impl& self) { return std::dynamic_pointer_cast<Impl>(self.clone()); })
      .def("__repr__", &describe<Impl>)
      .def("__str__", &describe<Impl>)
      .def("__call__", [](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
        return self.attr("forward")(*args, **kwargs);
      });
  return cls;
}

}  // namespace attnpack
