#include <attnpack/modules/rotary_embedding.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/checks.h>
#include <attnpack/ops/rope.h>

#include <cmath>

namespace attnpack {

RopeSettings rope_settings(const RotaryEmbeddingOptions& options) {
  const auto dim = options.dim();
  ATTNPACK_CHECK(dim > 0 && dim % 2 == 0, "dim: got ", dim, ", want an even number of dims to rotate in pairs");
  ATTNPACK_CHECK(options.base() > 0 && std::isfinite(options.base()), "base: got ", options.base(),
                 ", want a number above 0");
  check_size("max_positions", options.max_positions());
  const auto scaling = options.scaling().value_or(RopeScaling());
  const auto& type = scaling.rope_type();
  ATTNPACK_CHECK(type == "default" || type == "linear", "scaling: rope_type '", type,
                 "' is not built in this version; want 'default' or 'linear'");
  ATTNPACK_CHECK(scaling.factor() > 0 && std::isfinite(scaling.factor()), "scaling: got factor ", scaling.factor(),
                 ", want a number above 0");

  const double stretch = type == "linear" ? scaling.factor() : 1.0;
  RopeSettings settings;
  settings.interleaved = options.interleaved();
  for (int64_t i = 0; i < dim; i += 2) {
    settings.inv_freq.push_back(std::pow(options.base(), -static_cast<double>(i) / dim) / stretch);
  }
  return settings;
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(RotaryEmbeddingOptions options) : options(std::move(options)) { reset(); }

void RotaryEmbeddingImpl::reset() { settings = rope_settings(options); }

at::Tensor RotaryEmbeddingImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& positions) {
  ATTNPACK_CHECK(x.dim() == 4, "x: got shape ", x.sizes(), ", want [B, H, L, D]");
  auto at = positions ? *positions : at::arange(x.size(2), x.options().dtype(at::kLong));
  auto [cos, sin] = rope_table(at, settings.inv_freq, settings.factor);
  if (at.dim() == 2) cos = cos.unsqueeze(1), sin = sin.unsqueeze(1);
  return apply_rope(x, cos, sin, settings.interleaved);
}

void RotaryEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "attnpack::RotaryEmbedding(" << options.dim() << ", base=" << options.base();
  if (options.scaling()) {
    stream << ", scaling={" << options.scaling()->rope_type() << ", factor=" << options.scaling()->factor() << "}";
  }
  stream << (options.interleaved() ? ", interleaved=true)" : ")");
}

}  // namespace attnpack
