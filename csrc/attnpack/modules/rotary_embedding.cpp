#include <attnpack/modules/rotary_embedding.h>

#include <attnpack/core/padded.h>
#include <attnpack/modules/detail/print_options.h>

namespace attnpack {

RotaryEmbeddingImpl::RotaryEmbeddingImpl(RotaryEmbeddingOptions options) : options(std::move(options)) { reset(); }

void RotaryEmbeddingImpl::reset() {
  const auto& o = options;
  settings = rope_settings(o.dim(), o.base(), o.max_positions(), o.scaling(), o.interleaved(), o.raw_keys());
}

at::Tensor RotaryEmbeddingImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& positions) {
  check_defined("x", x);
  ATTNPACK_CHECK(x.dim() == 4, "x: got shape ", x.sizes(), ", want [B, H, L, D]");
  check_positions(positions, x);
  return rotate_at(x, settings, positions ? *positions : at::arange(x.size(2), x.options().dtype(at::kLong)));
}

void RotaryEmbeddingImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::RotaryEmbedding", options);
}

}  // namespace attnpack
