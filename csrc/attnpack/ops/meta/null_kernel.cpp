#include <ATen/ATen.h>
#include <torch/library.h>

// The shapes and exact strides of the other backends' results, without data. torch.compile and export use them.
namespace attnpack {
namespace {

at::Tensor null_meta(const at::Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) { m.impl("null", attnpack::null_meta); }
