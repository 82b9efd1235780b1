#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/pimpl.h>

#include <attnpack/ops/option_list.h>
#include <attnpack/rope/rotate.h>

#include <optional>

namespace attnpack {

struct RotaryEmbeddingOptions : OptionList<RotaryEmbeddingOptions> {
  explicit RotaryEmbeddingOptions(int64_t dim) : dim_(dim) {}
  ATTNPACK_OPTION(int64_t, dim);  // rotated dims of a head, even; the rest of the head passes through
  ATTNPACK_OPTION(double, base) = 10000.0;
  ATTNPACK_OPTION(int64_t, max_positions) = 2048;  // length of training; positions past it are legal
  ATTNPACK_OPTION(std::optional<RopeScaling>, scaling);
  ATTNPACK_OPTION(bool, interleaved) = false;  // pairs (2i, 2i + 1) instead of (i, i + dim/2)
  // Caches hold keys before rotation; default where frequencies follow the length (dynamic, longrope).
  ATTNPACK_OPTION(std::optional<bool>, raw_keys);
};

// Rotary position embedding. Holds numbers, no tensors: nothing to save, nothing that .to(bfloat16) could round.
class RotaryEmbeddingImpl : public torch::nn::Cloneable<RotaryEmbeddingImpl> {
 public:
  explicit RotaryEmbeddingImpl(int64_t dim) : RotaryEmbeddingImpl(RotaryEmbeddingOptions(dim)) {}
  explicit RotaryEmbeddingImpl(RotaryEmbeddingOptions options);

  // Rotates x [B, H, L, D] at positions ([L] or [B, L] int64, default 0..L-1). For frequencies that follow the length,
  // a row's length is its highest position + 1.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& positions = std::nullopt);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  RotaryEmbeddingOptions options;
  RopeSettings settings;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<at::Tensor>())})
};
TORCH_MODULE(RotaryEmbedding);

}  // namespace attnpack
