#include <bindings/plain_linear.h>

#include <attnpack/modules/detail/heads.h>
#include <attnpack/ops/linear.h>
#include <bindings/common.h>
#include <bindings/register.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/PyInterpreter.h>

#include <array>
#include <atomic>
#include <vector>

namespace attnpack {

namespace {

using at::Tensor;

// Names that are looked up in a module.
struct Name {
  explicit Name(const char* text) : object(PyUnicode_InternFromString(text)) {}
  PyObject* object;
};

py::object attribute(const py::handle& object, const Name& name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name.object));
}

// Empty where the dict lacks it. It owns what it gives: without the GIL another thread may take it out of the dict.
py::object item(const py::handle& dict, const Name& name) {
  if (!PyDict_Check(dict.ptr())) return {};
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyDict_GetItemRef(dict.ptr(), name.object, &found);
  return py::reinterpret_steal<py::object>(found);
#else
  return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict.ptr(), name.object));
#endif
}

// Whether the code of `function` stands in the file of the class `owner`. A patch has code of its own, whatever name
// and module it shows.
bool is_code_of(const py::handle& function, const py::handle& owner) {
  const auto code = py::getattr(function, "__code__", py::none());
  if (code.is_none()) return false;
  const py::dict modules = py::module_::import("sys").attr("modules");
  const auto module = modules.attr("get")(owner.attr("__module__"));
  return py::getattr(module, "__file__", py::none()).equal(code.attr("co_filename"));
}

// torch's nn.Linear. Its forward may have been patched before attnpack was imported.
struct TorchLinear {
  py::object type = py::module_::import("torch.nn").attr("Linear");
  std::atomic<PyObject*> forward = nullptr;  // torch's own, once it has been seen: a reference that is never given up
  py::object has_global_hook = py::module_::import("torch.nn.modules.module").attr("_has_any_global_hook");
};
TorchLinear& torch_linear() {
  static auto* const found = new TorchLinear;  // never destroyed: Python may be gone by then
  return *found;
}

constexpr std::array kHooks{"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};

py::object attributes_of(const py::handle& module) {
  static const Name name("__dict__");
  return attribute(module, name);
}

// Whether the module has hooks or a forward of its own, so that a call does more than its class says.
bool is_watched_dict(const py::handle& attributes) {
  static const Name forward("forward");
  static const std::array hooks{Name(kHooks[0]), Name(kHooks[1]), Name(kHooks[2]), Name(kHooks[3])};
  if (item(attributes, forward)) return true;
  for (const Name& name : hooks) {
    const auto value = item(attributes, name);
    if (value && PyObject_IsTrue(value.ptr()) != 0) return true;
  }
  return false;
}

bool is_watched(const py::handle& module) { return is_watched_dict(attributes_of(module)); }

bool is_linear(const py::handle& layer) {
  return reinterpret_cast<PyObject*>(Py_TYPE(layer.ptr())) == torch_linear().type.ptr();
}

// Whether a mode of torch.overrides is active, which wants to see the calls of torch's functions. torch.device as a
// context, and set_default_device, are such modes too, which only look at calls that make tensors.
bool is_seen_by_mode() {
  if (!at::impl::torch_function_mode_enabled()) return false;
  static const auto* const device_context =
      new py::object(py::module_::import("torch.utils._device").attr("DeviceContext"));
  const int64_t count = at::impl::PythonTorchFunctionTLS::stack_len();
  for (int64_t i = 0; i < count; ++i) {
    const auto& mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i);
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode->ptr(getPyInterpreter()))) != device_context->ptr()) return true;
  }
  return false;
}

// Whether a call of an nn.Linear is torch's linear, as far as its class, the hooks of all modules and modes say.
bool is_unpatched() {
  static const Name name("forward");
  auto& linear = torch_linear();
  const auto forward = attribute(linear.type, name);
  if (forward.ptr() != linear.forward.load(std::memory_order_acquire)) {
    if (!is_code_of(forward, linear.type)) return false;
    linear.forward.store(forward.inc_ref().ptr(), std::memory_order_release);
  }
  return !py::cast<bool>(py::bool_(linear.has_global_hook())) && !is_seen_by_mode();
}

// Whether a call of layer runs only torch's linear: no other type, no forward of its own, no hooks.
bool is_plain(const py::handle& layer) { return is_linear(layer) && !is_watched(layer) && is_unpatched(); }

// Empty where the layer lacks it.
py::object parameter(const py::handle& attributes, const Name& name) {
  static const Name parameters("_parameters");
  const auto value = item(attributes, parameters);
  return value ? item(value, name) : py::object();
}

const Name& weight_name() {
  static const Name name("weight");
  return name;
}

// A tensor whose class is Tensor or Parameter itself: others, such as quantised weights, have products of their own.
bool is_exact(const py::handle& value) { return value && THPVariable_CheckExact(value.ptr()); }

// The products of x with each of the layers; None unless all of them are plain, with tensors of no other class.
py::object project(const py::object& layers, const py::object& x) {
  c10::SmallVector<Tensor, 3> weights, biases;
  if (!is_exact(x) || !is_unpatched()) return py::none();
  for (const auto& layer : py::reinterpret_borrow<py::sequence>(layers)) {
    static const Name bias_name("bias");
    if (!is_linear(layer)) return py::none();
    const auto attributes = attributes_of(layer);
    const auto weight = parameter(attributes, weight_name()), bias = parameter(attributes, bias_name);
    if (is_watched_dict(attributes) || !is_exact(weight) || !bias || !(bias.is_none() || is_exact(bias)))
      return py::none();
    weights.push_back(THPVariable_Unpack(weight.ptr()));
    if (!bias.is_none()) biases.push_back(THPVariable_Unpack(bias.ptr()));
  }
  if (!biases.empty() && biases.size() != weights.size()) return py::none();
  const Tensor input = THPVariable_Unpack(x.ptr());
  return py::cast(without_gil([&]() -> std::vector<Tensor> {
    if (weights.size() != 1) return linears(input, weights, biases);
    return {linear<>(input, weights[0], biases.empty() ? OptionalTensor() : biases[0])};
  }));
}

// [B, L, H * D] -> [B, H, L, D], a view
Tensor split_heads_py(const Tensor& x, int64_t num_heads) {
  return split_heads(x, num_heads, num_heads == 0 ? 0 : x.size(-1) / num_heads);
}

}  // namespace

std::optional<Tensor> linear_weight(const py::handle& layer) {
  // A hook of accelerate brings the weight when the layer is called: until then it is on the device "meta".
  static const Name offload("_hf_hook");
  if (!is_linear(layer) || item(attributes_of(layer), offload)) return std::nullopt;
  const auto weight = parameter(attributes_of(layer), weight_name());
  return weight && THPVariable_Check(weight.ptr()) ? std::make_optional(THPVariable_Unpack(weight.ptr()))
                                                   : std::nullopt;
}

void register_plain_linear(py::module_& m) {
  m.attr("HOOKS") = py::tuple(py::cast(kHooks));
  m.def("is_plain", [](const py::object& layer) { return is_plain(layer); });
  m.def("is_code_of", &is_code_of);
  m.def("is_seen_by_mode", &is_seen_by_mode);
  m.def("is_watched", [](const py::object& module) { return is_watched(module); });
  define(m, "project", &project, {"layers", "x"});
  define(m, "split_heads", &split_heads_py, {"x", "num_heads"});
}

}  // namespace attnpack
