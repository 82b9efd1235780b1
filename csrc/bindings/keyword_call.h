#pragma once

#include <bindings/arguments.h>

#include <cstdint>
#include <functional>
#include <vector>

// Functions that take some arguments by place, and the others by name in one dict, which Python's functions have from
// their own keywords.
namespace attnpack {

// Names as Python interns them: a keyword in a call is the same object.
class InternedNames {
 public:
  template <class Members>
  explicit InternedNames(const Members& members) {
    members([&](const char* name, const auto&) { names_.push_back(PyUnicode_InternFromString(name)); });
  }
  PyObject* operator[](size_t place) const { return names_[place]; }
  static constexpr size_t kNone = SIZE_MAX;
  // The place of a name from place `first` on, or kNone.
  size_t find(PyObject* name, size_t first) const;
  Names all() const;

 private:
  std::vector<PyObject*> names_;  // for ever
};

// Thrown for a name that is no parameter in a call that has another way to go (fast_path.h).
struct UnknownName {};

// The arguments of one call.
class GivenArguments {
 public:
  // values: `placed` arguments, and then a dict.
  GivenArguments(const char* function, PyObject* const* values, size_t placed);
  // values: `placed` arguments, and then those of `names`, a tuple or null, as vectorcall has them.
  GivenArguments(const char* function, PyObject* const* values, size_t placed, PyObject* names);

  // Reads what was given. `members` calls its argument with the name of each parameter and the variable that takes it:
  // first of those by place.
  template <class Members>
  void read(const Members& members) const {
    static const InternedNames names(members);
    for (size_t i = 0; i < placed_; ++i) read_one(members, i, values_[i]);
    const auto read_named = [&](PyObject* name, PyObject* value) {
      const size_t place = names.find(name, placed_);
      if (place == InternedNames::kNone) raise_unknown(name, names);
      read_one(members, place, value);
    };
    PyObject *name = nullptr, *value = nullptr;
    if (keywords_ != nullptr) {
      for (Py_ssize_t next = 0; PyDict_Next(keywords_, &next, &name, &value);) read_named(name, value);
    }
    for (Py_ssize_t i = 0; i < count_; ++i) read_named(PyTuple_GET_ITEM(names_, i), values_[placed_ + i]);
  }

 private:
  template <class Members>
  void read_one(const Members& members, size_t place, PyObject* value) const {
    size_t index = 0;
    members([&]<class T>(const char* parameter, T& variable) {
      if (index++ == place) variable = read_value<T>(parameter, value, parameter, function_);
    });
  }
  [[noreturn]] void raise_unknown(PyObject* name, const InternedNames& taken) const;

  const char* function_;
  PyObject* const* values_;
  size_t placed_;
  PyObject* keywords_ = nullptr;  // a dict
  PyObject* names_ = nullptr;     // of the values from placed_ on
  Py_ssize_t count_ = 0;          // how many names
};

// placed: how many arguments stand before the dict.
using KeywordCall = std::function<py::object(const GivenArguments& given)>;
void add_keyword_function(py::module_& m, const char* name, size_t placed, KeywordCall call);

}  // namespace attnpack
