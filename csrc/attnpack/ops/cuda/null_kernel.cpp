#include <ATen/ATen.h>
#include <torch/library.h>

namespace attnpack {
namespace {

using at::Tensor;

Tensor null_cuda(const Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) { m.impl("null", attnpack::null_cuda); }
