#include <bindings/common.h>

#include <attnpack/core/check.h>

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
    TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "attnpack: dtype is ", shown(dtype),
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
  return function + "(" + c10::Join(", ", shown) + ")";
}

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
    TORCH_CHECK_TYPE(name.cast<std::string>() == "device" || name.cast<std::string>() == "dtype",
                     "attnpack: to: got keyword ", name.cast<std::string>(), ", want device or dtype");
    read(py::reinterpret_borrow<py::object>(value));
  }
  return target;
}

}  // namespace attnpack
