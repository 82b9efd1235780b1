#pragma once

#include <bindings/arguments.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/state_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace attnpack {

using OptionalTensor = std::optional<at::Tensor>;

// device and dtype as torch's own modules take them; None asks torch, so that `with torch.device(...)` is honoured.
Factory make_factory(const py::object& device, const py::object& dtype);

template <typename Options>
py::dict options_dict(const Options& options);

// "forward(x, context, *, mask, causal)": the first `positional` names may be given without them.
std::string signature(const std::string& function, const Names& names, size_t positional);

// All methods are added by this one function: the code that pybind makes for each costs the compiler seconds.
using Method = std::function<py::object(const py::object& self, Arguments& arguments)>;
void add_method(const py::object& cls, const char* name, const Names& names, size_t positional, Method method);

// The object behind `self`. Its holder refuses an object whose constructor has not run.
template <typename T>
std::shared_ptr<T> self_of(const py::object& self) {
  py::detail::make_caster<std::shared_ptr<T>> caster;
  ATTNPACK_CHECK_TYPE(caster.load(self, /*convert=*/false), "self is ", shown(self), ", wants an object of ",
                      py::type::of<T>().attr("__name__").template cast<std::string>());
  return py::detail::cast_op<std::shared_ptr<T>>(caster);
}

// Binds `function`, which is called as function(self, Arguments&) and reads the arguments that `names` lists.
template <typename Class, typename Function>
void bind_method(Class& cls, const char* name, const Names& names, size_t positional, const Function& function) {
  add_method(cls, name, names, positional, [function](const py::object& self, Arguments& arguments) {
    const auto object = self_of<typename Class::type>(self);
    return object_of([&] { return function(*object, arguments); });
  });
}

// All properties are added by this one function, for the same reason. They cannot be set.
using Getter = std::function<py::object(const py::object& self)>;
void add_property(const py::object& cls, const char* name, Getter get);

// Binds a member, a member function or a function of the object.
template <typename Class, typename Get>
void bind_property(Class& cls, const char* name, const Get& get) {
  add_property(cls, name, [get](const py::object& self) {
    const auto object = self_of<typename Class::type>(self);
    return object_of([&] { return std::invoke(get, *object); });
  });
}

// Adds the methods that all modules have: named_parameters, state_dict, load_state_dict, clone, to ... torch's own
// binding of torch::nn::Module gives the others.
void add_module_methods(const py::object& cls);
// Adds a method that calls forward with need_weights=True.
void add_forward_with_weights(const py::object& cls);

template <typename Impl>
py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> bind_module(py::module_& m, const char* name,
                                                                       const char* doc) {
  py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> cls(m, name, doc);
  add_module_methods(cls);
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
            return std::make_shared<Impl>(
                options_of_call<Options, Sizes...>(name.c_str(), args, kwargs, positional, required));
          }),
          signature(name, names, positional).c_str());
  bind_method(cls, "options", {}, 0, [](const Impl& self, Arguments& arguments) {
    arguments.finish();
    return options_dict(self.options);
  });
}

// A module whose forward takes one tensor.
template <typename Impl, typename Options, typename... Sizes>
void bind_unary(py::module_& m, const char* name, const char* doc, const char* input) {
  auto cls = bind_module<Impl>(m, name, doc);
  bind_options<Impl, Options, Sizes...>(cls);
  bind_method(cls, "forward", {input}, 1, [input](Impl& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>(input);
    arguments.finish();
    return without_gil([&] { return self.forward(x); });
  });
}

}  // namespace attnpack
