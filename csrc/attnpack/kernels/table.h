#pragma once

#include <cstring>

#include <attnpack/ops/cpu/isa/kernels.h>

namespace attnpack {

struct Isa {
  const char* name;
  bool present;  // in this CPU
  bool faster;   // than the instruction sets before it
  Kernels kernels;
};

// The instruction sets of libattnpack_kernels.so, from the plainest to the widest. Both libraries are of one build: the
// other members show if they are not.
struct KernelTable {
  const char* version;  // ATTNPACK_VERSION
  size_t kernels_size;  // sizeof(Kernels)
  const Isa* isas;
  size_t count;
  const Isa* begin() const { return isas; }
  const Isa* end() const { return isas + count; }
};

// The instruction set of that name, or the last one that is faster where the name is null or empty. Null if this CPU
// lacks it.
inline const Isa* choose_isa(const KernelTable& table, const char* name) {
  const Isa* best = nullptr;
  const bool named = name && *name;
  for (const Isa& isa : table)
    if (isa.present && (named ? std::strcmp(name, isa.name) == 0 : isa.faster)) best = &isa;
  return best;
}

}  // namespace attnpack

// All that libattnpack.so takes of libattnpack_kernels.so, beside the threads that help with loops.
extern "C" [[gnu::visibility("default")]] const attnpack::KernelTable* attnpack_kernel_table();
