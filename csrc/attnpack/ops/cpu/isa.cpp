#include <cstdlib>
#include <string>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/isa_table.h>
#include <attnpack/ops/library.h>

namespace attnpack {
namespace {

// The instruction set that the user wants; null for none.
const char* named_isa() {
  const char* name = std::getenv("ATTNPACK_ISA");
  return name && *name ? name : nullptr;
}

const Isa& choose_isa() {
  const char* const wanted = named_isa();
  const Isa* best = nullptr;
  std::string names;
  for (const Isa& isa : kIsas) {
    if (!isa.present) continue;
    names += std::string(names.empty() ? "" : ", ") + isa.name;
    if (wanted ? wanted == std::string(isa.name) : isa.faster) best = &isa;
  }
  ATTNPACK_CHECK(best, "ATTNPACK_ISA is '", wanted, "', this CPU has: ", names);
  return *best;
}

const Isa& chosen_isa() {
  static const Isa& isa = choose_isa();
  return isa;
}

// The last instruction set that is present, unless one is named.
const Isa& choose_for_bytes() {
  const Isa* best = &chosen_isa();
  if (named_isa()) return *best;
  for (const Isa& isa : kIsas)
    if (isa.present) best = &isa;
  return *best;
}

}  // namespace

const char* instruction_set() { return chosen_isa().name; }
const Kernels& kernels_in_use() { return chosen_isa().kernels; }
const Kernels& byte_kernels() {
  static const Isa& isa = choose_for_bytes();
  return isa.kernels;
}

}  // namespace attnpack
