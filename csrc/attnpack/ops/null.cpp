#include <torch/library.h>

#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/null.h>

// <op>.cpp holds the schema and the public function, which makes one dispatcher call. Checks that every backend needs
// go into a function of their own here. The CPU and Meta kernels call it.
namespace attnpack {

at::Tensor null(const at::Tensor& x) {
  static const DispatchedOp<decltype(null)> op("attnpack::null");
  return op(x);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) { m.def("null(Tensor x) -> Tensor"); }
