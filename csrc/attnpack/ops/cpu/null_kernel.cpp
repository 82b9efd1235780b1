#include <ATen/ATen.h>
#include <torch/library.h>

// Each backend has a file of its own: an anonymous namespace and one registration block.
namespace attnpack {
namespace {

at::Tensor null_cpu(const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("null", attnpack::null_cpu); }
