#include <cstdlib>
#include <string>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/isa.h>

namespace attnpack {
namespace {

struct Isa {
  const char* name;
  bool present;
  Kernels kernels;
};

// From the plainest to the widest.
const Isa kIsas[] = {
    {"baseline", true, ATTNPACK_KERNELS(baseline)},
#if defined(__x86_64__)
    {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"),
     ATTNPACK_KERNELS(avx2)},
    {"avx512",
     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq"),
     ATTNPACK_KERNELS(avx512)},
#endif
};

const Isa& choose() {
  const char* wanted = std::getenv("ATTNPACK_ISA");
  const Isa* best = nullptr;
  std::string names;
  for (const Isa& isa : kIsas) {
    if (!isa.present) continue;
    names += std::string(names.empty() ? "" : ", ") + isa.name;
    if (!wanted || wanted == std::string(isa.name)) best = &isa;
  }
  ATTNPACK_CHECK(best, "ATTNPACK_ISA is '", wanted, "', this CPU has: ", names);
  return *best;
}

const Isa& chosen() {
  static const Isa& isa = choose();
  return isa;
}

}  // namespace

const char* isa_name() { return chosen().name; }
const Kernels& kernels_in_use() { return chosen().kernels; }

}  // namespace attnpack
