#include <cstdlib>
#include <string>

#include <attnpack/core/check.h>
#include <attnpack/kernels/table.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/library.h>
#include <attnpack/version.h>

namespace attnpack {
namespace {

const KernelTable& kernel_table() {
  static const KernelTable& table = [&]() -> const KernelTable& {
    const KernelTable& found = *attnpack_kernel_table();
    ATTNPACK_CHECK(std::string(found.version) == ATTNPACK_VERSION && found.kernels_size == sizeof(Kernels),
                   "libattnpack_kernels is of version ", found.version, " or of another build, libattnpack of ",
                   ATTNPACK_VERSION, ": install both from one wheel or build");
    return found;
  }();
  return table;
}

// The instruction set that the user wants; null for none.
const char* named_isa() {
  const char* name = std::getenv("ATTNPACK_ISA");
  return name && *name ? name : nullptr;
}

const Isa& choose_named_isa() {
  const Isa* const best = choose_isa(kernel_table(), named_isa());
  std::string names;
  for (const Isa& isa : kernel_table())
    if (isa.present) names += std::string(names.empty() ? "" : ", ") + isa.name;
  ATTNPACK_CHECK(best, "ATTNPACK_ISA is '", named_isa(), "', this CPU has: ", names);
  return *best;
}

const Isa& chosen_isa() {
  static const Isa& isa = choose_named_isa();
  return isa;
}

}  // namespace

const char* instruction_set() { return chosen_isa().name; }
const Kernels& kernels_in_use() { return chosen_isa().kernels; }

}  // namespace attnpack
