#pragma once

#include <bindings/arguments.h>

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

template <typename Options>
py::dict options_dict(const Options& options);

// "forward(x, context, *, mask, causal)": the first `positional` names may be given without them.
std::string signature(const std::string& function, const Names& names, size_t positional);

template <typename Impl>
std::string describe(const std::shared_ptr<Impl>& module) {  // by its holder, which an object without one refuses
  return c10::str(static_cast<const torch::nn::Module&>(*module));
}

// Binds `function`, which is called as function(self, Arguments&) and reads the arguments that `names` lists.
template <typename Class, typename Function>
void bind_method(Class& cls, const char* name, const Names& names, size_t positional, const Function& function) {
  py::options no_signatures;
  no_signatures.disable_function_signatures();
  const Names places(names.begin(), names.begin() + positional);
  cls.def(
      name,
      // The holder refuses an object whose constructor has not run.
      [=](const std::shared_ptr<typename Class::type>& self, const py::args& args, const py::kwargs& kwargs) {
        Arguments arguments(name, places, args, kwargs);
        return function(*self, arguments);
      },
      signature(name, names, positional).c_str());
}

// Binds what every module can do. The rest comes from torch's own binding of torch::nn::Module.
template <typename Impl>
py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> bind_module(py::module_& m, const char* name,
                                                                       const char* doc) {
  py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> cls(m, name, doc);
  bind_method(cls, "named_parameters", {}, 0, [](Impl& self, Arguments& arguments) {
    arguments.finish();
    py::list pairs;
    for (const auto& item : self.named_parameters()) pairs.append(py::make_tuple(item.key(), item.value()));
    return pairs;
  });
  bind_method(cls, "state_dict", {}, 0, [](Impl& self, Arguments& arguments) {
    arguments.finish();
    return state_dict(self);
  });
  const auto bind_load = [&](const char* name, auto load) {
    bind_method(cls, name, {"state_dict", "strict"}, 2, [load](Impl& self, Arguments& arguments) {
      const auto tensors = arguments.require<StateDict>("state_dict");
      bool strict = true;
      arguments.read("strict", strict);
      arguments.finish();
      const auto result = load(self, tensors, strict);
      return py::make_tuple(result.missing, result.unexpected);
    });
  };
  bind_load("load_state_dict",
            [](Impl& self, const StateDict& tensors, bool strict) { return load_state_dict(self, tensors, strict); });
  // Puts the tensors themselves in place of the parameters: both sides share storage and gradients.
  bind_load("assign_state_dict",
            [](Impl& self, const StateDict& tensors, bool strict) { return assign_state_dict(self, tensors, strict); });
  bind_method(cls, "train", {"mode"}, 1, [](Impl& self, Arguments& arguments) {
    bool mode = true;
    arguments.read("mode", mode);
    arguments.finish();
    self.train(mode);
    return std::static_pointer_cast<Impl>(self.shared_from_this());
  });
  bind_method(cls, "eval", {}, 0, [](Impl& self, Arguments& arguments) {
    arguments.finish();
    self.eval();
    return std::static_pointer_cast<Impl>(self.shared_from_this());
  });
  bind_method(cls, "clone", {}, 0, [](Impl& self, Arguments& arguments) {
    arguments.finish();
    return std::dynamic_pointer_cast<Impl>(self.clone());
  });
  cls.def("to",
          [](std::shared_ptr<Impl> self, const py::args& args, const py::kwargs& kwargs) {
            const auto target = parse_to(args, kwargs);
            if (target.dtype) self->to(*target.dtype);
            if (target.device) self->to(*target.device);
            return self;
          })
      .def("__repr__", &describe<Impl>)
      .def("__str__", &describe<Impl>)
      .def("__call__", [](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
        return self.attr("forward")(*args, **kwargs);
      });
  return cls;
}

// An option as Python's constructors take it.
template <typename T>
py::object to_python(const T& value) {
  if constexpr (requires { T::for_each_option(value, [](const char*, const auto&) {}); })
    return options_dict(value);
  else if constexpr (requires { value.is_empty(); })  // the holder of a module
    return value.is_empty() ? py::none() : py::cast(value.ptr());
  else
    return py::cast(value);
}
template <typename T>
py::object to_python(const std::optional<T>& value) {
  return value ? to_python(*value) : py::none();
}
// Options as a dict of constructor arguments, without device and dtype.
template <typename Options>
py::dict options_dict(const Options& options) {
  py::dict result;
  Options::for_each_option(options, [&](const char* name, const auto& value) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(value)>, Factory>) result[name] = to_python(value);
  });
  return result;
}

// Binds the constructor of a module whose options are Options. Sizes are the types of the arguments of Options'
// constructor; `positional` and `required` as in options_of_call.
template <typename Impl, typename Options, typename... Sizes, typename Class>
void bind_options(Class& cls, size_t positional = sizeof...(Sizes), const Names& required = {}) {
  const auto name = cls.attr("__name__").template cast<std::string>();
  auto names = option_names(Options(Sizes{}...));
  names.insert(names.end(), {"device", "dtype"});
  std::erase(names, "factory");
  py::options no_signatures;
  no_signatures.disable_function_signatures();
  cls.def(py::init([=](const py::args& args, const py::kwargs& kwargs) {
            return Impl(options_of_call<Options, Sizes...>(name.c_str(), args, kwargs, positional, required));
          }),
          signature(name, names, positional).c_str());
  bind_method(cls, "options", {}, 0, [](const Impl& self, Arguments& arguments) {
    arguments.finish();
    return options_dict(self.options);
  });
}

}  // namespace attnpack
