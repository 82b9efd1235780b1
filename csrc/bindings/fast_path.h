#pragma once

#include <bindings/keyword_call.h>

// Functions of Python whose plain eager calls run in C++, without entering the function (PERFORMANCE.md).
//
// A FastPathFunction stands in front of a function of Python. A call whose arguments are the usual ones goes to C++ at
// once. All others call the function: those of torch's tracers, nested tensors, and arguments that do not fit, for
// which Python's own rules say what is wrong. torch.compile never sees C++, because it traces the class's `__call__`.
namespace attnpack {

// How C++ runs the plain calls of the function `name`.
struct FastPath {
  const char* name;
  size_t required, placed;  // a plain call has at least and at most so many arguments by place
  KeywordCall call;
};
void add_fast_path(FastPath path);

// The same, and the function of the module that Python's function calls with `placed` arguments and a dict.
void add_public_function(py::module_& m, FastPath path);

// The class, and the function that sets its `__call__`.
void register_fast_path_function(py::module_& m);

}  // namespace attnpack
