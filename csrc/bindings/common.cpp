#include <bindings/common.h>

#include <attnpack/core/check.h>

#include <utility>

namespace attnpack {

namespace {

at::Device to_device(const py::object& device) {
  try {
    return py::module_::import("torch").attr("device")(device).cast<at::Device>();
  } catch (const py::error_already_set&) {
    raise_wrong_kind("device", device, "a torch.device or its name, such as 'cpu' or 'cuda:0', or None");
  }
}

}  // namespace

Factory make_factory(const py::object& device, const py::object& dtype) {
  Factory factory;
  factory.device = device.is_none() ? py::module_::import("torch").attr("get_default_device")().cast<at::Device>()
                                    : to_device(device);
  if (!dtype.is_none()) {
    ATTNPACK_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "dtype is ", shown(dtype),
                        ", wants a torch.dtype such as torch.float32, or None");
    factory.dtype = dtype.cast<at::ScalarType>();
    ATTNPACK_CHECK(at::isFloatingType(*factory.dtype), "dtype is ", py::str(dtype).cast<std::string>(),
                   ", wants a floating one such as torch.float32");
  }
  return factory;
}

std::string signature(const std::string& function, const Names& names, size_t positional) {
  auto shown = names;
  if (positional < names.size()) shown.insert(shown.begin() + positional, "*");
  return function + "(" + joined_by(", ", shown) + ")";
}

namespace {

Factory parse_to(const py::args& args, const py::kwargs& kwargs) {
  Factory target;
  const auto read = [&](const py::object& value) {
    if (THPDtype_Check(value.ptr())) {
      target.dtype = value.cast<at::ScalarType>();
    } else if (!value.is_none()) {
      target.device = to_device(value);
    }
  };
  for (const auto& value : args) read(py::reinterpret_borrow<py::object>(value));
  for (const auto& [name, value] : kwargs) {
    ATTNPACK_CHECK_TYPE(name.cast<std::string>() == "device" || name.cast<std::string>() == "dtype", "to: got keyword ",
                        name.cast<std::string>(), ", want device or dtype");
    read(py::reinterpret_borrow<py::object>(value));
  }
  return target;
}

using Call = std::function<py::object(const py::object& self, const py::args& args, const py::kwargs& kwargs)>;

void add_call(const py::object& cls, const char* name, const std::string& doc, Call call) {
  py::options no_signatures;
  if (!doc.empty()) no_signatures.disable_function_signatures();
  cls.attr(name) = py::cpp_function(std::move(call), py::name(name), py::is_method(cls), doc.c_str());
}

// A method of a torch::nn::Module of any class.
template <typename Function>
void add_module_method(const py::object& cls, const char* name, const Names& names, const Function& function) {
  add_method(cls, name, names, names.size(), [function](const py::object& self, Arguments& arguments) -> py::object {
    return function(self, *self_of<torch::nn::Module>(self), arguments);
  });
}

}  // namespace

void add_property(const py::object& cls, const char* name, Getter get) {
  const py::handle property(reinterpret_cast<PyObject*>(&PyProperty_Type));
  cls.attr(name) = property(py::cpp_function([get = std::move(get)](const py::object& self) { return get(self); }));
}

void add_method(const py::object& cls, const char* name, const Names& names, size_t positional, Method method) {
  const Names places(names.begin(), names.begin() + positional);
  add_call(cls, name, signature(name, names, positional),
           [=](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
             Arguments arguments(name, places, args, kwargs);
             return method(self, arguments);
           });
}

void add_module_methods(const py::object& cls) {
  using torch::nn::Module;
  add_module_method(cls, "named_parameters", {}, [](const py::object&, Module& self, Arguments& arguments) {
    arguments.finish();
    py::list pairs;
    for (const auto& item : self.named_parameters()) pairs.append(py::make_tuple(item.key(), item.value()));
    return pairs;
  });
  add_module_method(cls, "state_dict", {}, [](const py::object&, Module& self, Arguments& arguments) {
    arguments.finish();
    return py::cast(state_dict(self));
  });
  const auto add_load = [&](const char* name, auto load) {
    add_module_method(cls, name, {"state_dict", "strict"},
                      [load](const py::object&, Module& self, Arguments& arguments) {
                        const auto tensors = arguments.require<StateDict>("state_dict");
                        bool strict = true;
                        arguments.read("strict", strict);
                        arguments.finish();
                        const auto result = load(self, tensors, strict);
                        return py::make_tuple(result.missing, result.unexpected);
                      });
  };
  add_load("load_state_dict",
           [](Module& self, const StateDict& tensors, bool strict) { return load_state_dict(self, tensors, strict); });
  // Puts the tensors themselves in place of the parameters: both sides share storage and gradients.
  add_load("assign_state_dict", [](Module& self, const StateDict& tensors, bool strict) {
    return assign_state_dict(self, tensors, strict);
  });
  add_module_method(cls, "train", {"mode"}, [](const py::object& object, Module& self, Arguments& arguments) {
    bool mode = true;
    arguments.read("mode", mode);
    arguments.finish();
    self.train(mode);
    return object;
  });
  add_module_method(cls, "eval", {}, [](const py::object& object, Module& self, Arguments& arguments) {
    arguments.finish();
    self.eval();
    return object;
  });
  add_module_method(cls, "clone", {}, [](const py::object&, Module& self, Arguments& arguments) {
    arguments.finish();
    return py::cast(self.clone());
  });
  add_call(cls, "to", "", [](const py::object& object, const py::args& args, const py::kwargs& kwargs) {
    const auto self = self_of<Module>(object);
    const auto target = parse_to(args, kwargs);
    if (target.dtype) self->to(*target.dtype);
    if (target.device) self->to(*target.device);
    return object;
  });
  for (const char* name : {"__repr__", "__str__"})
    add_module_method(cls, name, {}, [](const py::object&, Module& self, Arguments&) -> py::object {
      return py::str(text_of({std::as_const(self)}));
    });
  for (const char* name : {"__deepcopy__", "__reduce__"})
    add_call(cls, name, "", [](const py::object& self, const py::args&, const py::kwargs&) -> py::object {
      ATTNPACK_CHECK_TYPE(
          false, "an attnpack.cpp.", py::type::of(self).attr("__name__").template cast<std::string>(),
          " cannot be pickled or deep-copied: call .clone() for a copy, and .state_dict() for its tensors");
    });
  add_call(cls, "__call__", "", [](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
    return self.attr("forward")(*args, **kwargs);
  });
}

void add_forward_with_weights(const py::object& cls) {
  add_call(cls, "forward_with_weights", "", [](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
    kwargs["need_weights"] = true;
    return self.attr("forward")(*args, **kwargs);
  });
}

}  // namespace attnpack
