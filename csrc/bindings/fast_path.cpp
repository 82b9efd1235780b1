#include <bindings/fast_path.h>

#include <ATen/core/TensorBase.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>

#include <cstddef>
#include <map>
#include <string>

namespace attnpack {

namespace {

std::map<std::string, FastPath>& fast_paths() {
  static std::map<std::string, FastPath> paths;
  return paths;
}

// A tensor of an eager call: no tracer looks on, and it is not nested.
bool is_plain_tensor(PyObject* value) {
  if (!THPVariable_Check(value) || c10::impl::dispatch_mode_enabled()) return false;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  return !tensor.is_nested() && !tensor.key_set().has(c10::DispatchKey::Python);
}

struct FastPathFunction {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  PyObject* attributes;  // __dict__, among them __wrapped__ and __signature__
  PyObject* weak_references;
  PyObject* function;  // of Python
  const FastPath* path;

  static FastPathFunction* of(PyObject* self) { return reinterpret_cast<FastPathFunction*>(self); }

  static PyObject* call(PyObject* self, PyObject* const* values, size_t flagged_count, PyObject* names) {
    const FastPath& path = *of(self)->path;
    const auto placed = static_cast<size_t>(PyVectorcall_NARGS(flagged_count));
    if (path.required <= placed && placed <= path.placed && is_plain_tensor(values[0])) {
      try {
        return path.call(GivenArguments(path.name, values, placed, names)).release().ptr();
      } catch (const UnknownName&) {
      } catch (...) {
        torch::translate_exception_to_python(std::current_exception());
        return nullptr;
      }
    }
    return PyObject_Vectorcall(of(self)->function, values, flagged_count, names);
  }

  // FastPathFunction(name, function)
  static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
    const char* name = nullptr;
    PyObject* function = nullptr;
    if (!PyArg_ParseTuple(arguments, "sO", &name, &function)) return nullptr;
    const auto path = fast_paths().find(name);
    if (path == fast_paths().end()) return PyErr_Format(PyExc_KeyError, "no fast path is named %s", name);
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    of(self)->vectorcall = &call;
    of(self)->function = Py_NewRef(function);
    of(self)->path = &path->second;
    return self;
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(of(self)->attributes);
    Py_VISIT(of(self)->function);
    return 0;
  }

  static int clear(PyObject* self) {
    Py_CLEAR(of(self)->attributes);
    Py_CLEAR(of(self)->function);
    return 0;
  }

  static void deallocate(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (of(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  }

  // As a function does in a class.
  static PyObject* bind_to(PyObject* self, PyObject* owner, PyObject*) {
    return owner == nullptr || owner == Py_None ? Py_NewRef(self) : PyMethod_New(self, owner);
  }

  static PyObject* show(PyObject* self) { return PyObject_Repr(of(self)->function); }

  // Pickle finds it by this name in its module.
  static PyObject* reduce(PyObject* self, PyObject*) {
    return PyObject_GetAttrString(of(self)->function, "__qualname__");
  }
};

py::object make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPathFunction, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(FastPathFunction, attributes), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(FastPathFunction, weak_references), READONLY, nullptr},
      {}};
  static PyGetSetDef properties[] = {{"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
                                     {}};
  static PyMethodDef methods[] = {{"__reduce__", &FastPathFunction::reduce, METH_NOARGS, nullptr}, {}};
  static PyType_Slot slots[] = {
      {Py_tp_doc,
       const_cast<char*>("A function of Python whose plain eager calls run in C++.\n\ninspect.isfunction says no; "
                         "__wrapped__ is the function itself.")},
      {Py_tp_new, reinterpret_cast<void*>(&FastPathFunction::make)},
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(&FastPathFunction::bind_to)},
      {Py_tp_repr, reinterpret_cast<void*>(&FastPathFunction::show)},
      {Py_tp_members, members},
      {Py_tp_getset, properties},
      {Py_tp_methods, methods},
      {Py_tp_traverse, reinterpret_cast<void*>(&FastPathFunction::traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(&FastPathFunction::clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&FastPathFunction::deallocate)},
      {}};
  static PyType_Spec spec{
      "attnpack._C.FastPathFunction", sizeof(FastPathFunction), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, slots};
  return py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
}

}  // namespace

void add_fast_path(FastPath path) { fast_paths().emplace(path.name, std::move(path)); }

void add_public_function(py::module_& m, FastPath path) {
  add_keyword_function(m, path.name, path.placed, path.call);
  add_fast_path(std::move(path));
}

void register_fast_path_function(py::module_& m) {
  const py::object type = make_type();
  if (!type) throw py::error_already_set();
  m.add_object("FastPathFunction", type);
  // The interpreter calls a class by its slot, and compilers by what stands under `__call__`. They may differ, as they
  // do for a method `__call__` with METH_COEXIST; here the latter is a function of Python, which torch.compile can
  // trace.
  m.def("trace_fast_path_functions_by", [type](const py::function& traced) {
    auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
    if (PyDict_SetItemString(object->tp_dict, "__call__", traced.ptr()) != 0) throw py::error_already_set();
    PyType_Modified(object);
  });
}

}  // namespace attnpack
