#include <attnpack/core/check.h>
#include <attnpack/ops/library.h>
#include <attnpack/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

namespace attnpack {

const char* version() { return ATTNPACK_VERSION; }

namespace {

// torch has one table of operators per process. The second registration of a name raises torch's error in the middle of
// the others, so a second copy of the library stops before its first. The error ends the process unless the caller of
// dlopen is code that lets exceptions through: an initialiser has no other way to fail.
// 101 is the earliest priority that is a program's: before the initialisers of TORCH_LIBRARY in the other files.
[[gnu::constructor(101)]] void refuse_second_copy() {
  const bool is_second = c10::Dispatcher::singleton().findSchema({"attnpack::null", ""}).has_value();
  Dl_info file{};
  if (is_second) {
    dladdr(reinterpret_cast<const void*>(&version), &file);
  }
  ATTNPACK_CHECK(!is_second, "another copy of the library is loaded in this process, so ",
                 file.dli_fname ? file.dli_fname : "this one",
                 " cannot be: link and load one libattnpack (python -c \"import attnpack; print(attnpack.__file__)\" "
                 "prints where Python's is)");
}

}  // namespace

}  // namespace attnpack
