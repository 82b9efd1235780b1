#include <attnpack/kernels/table.h>

#include <iterator>

#include <attnpack/ops/cpu/isa_table.h>
#include <attnpack/version.h>

const attnpack::KernelTable* attnpack_kernel_table() {
  static const attnpack::KernelTable table{ATTNPACK_VERSION, sizeof(attnpack::Kernels), attnpack::kIsas,
                                           std::size(attnpack::kIsas)};
  return &table;
}
