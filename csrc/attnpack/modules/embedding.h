#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>

namespace attnpack {

struct EmbeddingOptions {
  EmbeddingOptions(int64_t vocab_size, int64_t embed_dim) : vocab_size_(vocab_size), embed_dim_(embed_dim) {}
  TORCH_ARG(int64_t, vocab_size);
  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(Factory, factory);

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("vocab_size", self.vocab_size_);
    visit("embed_dim", self.embed_dim_);
    visit("factory", self.factory_);
  }
};

// Rows of a table by token id, initialised N(0, 1) as torch's.
class EmbeddingImpl : public LeafModule<EmbeddingImpl> {
 public:
  EmbeddingImpl(int64_t vocab_size, int64_t embed_dim) : EmbeddingImpl(EmbeddingOptions(vocab_size, embed_dim)) {}
  explicit EmbeddingImpl(EmbeddingOptions options);

  at::Tensor forward(const at::Tensor& ids) { return look_up("ids", ids); }  // [B, L] int32 or int64 -> [B, L, E]
  // The same; errors call ids by the name that the caller's users know.
  at::Tensor look_up(const char* name, const at::Tensor& ids);

  void reset() override;
  void bind_members() { weight = parameters_["weight"]; }
  void pretty_print(std::ostream& stream) const override;

  EmbeddingOptions options;
  at::Tensor weight;  // [vocab_size, E]
};
TORCH_MODULE(Embedding);

}  // namespace attnpack
