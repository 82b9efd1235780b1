#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/ops/option_list.h>

#include <initializer_list>
#include <memory>
#include <vector>

namespace attnpack {

struct LinearOptions : OptionList<LinearOptions> {
  LinearOptions(int64_t in_features, int64_t out_features) : in_features_(in_features), out_features_(out_features) {}
  ATTNPACK_OPTION(int64_t, in_features);
  ATTNPACK_OPTION(int64_t, out_features);
  ATTNPACK_OPTION(bool, bias) = false;
  ATTNPACK_OPTION(Factory, factory);
};

// How a linear layer runs when its weight is sharded over processes (distributed/tensor_parallel.h).
class LinearShare {
 public:
  virtual ~LinearShare() = default;
  // The input of the product.
  virtual at::Tensor enter(const at::Tensor& x) const { return x; }
  // The output of the whole layer, from the weight [out, in] and the bias (undefined for none) that this process holds.
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const = 0;
};

// x W^T + b, initialised as torch's Linear. It can be made on any device (meta included) and in any dtype.
class LinearImpl : public LeafModule<LinearImpl> {
 public:
  LinearImpl(int64_t in_features, int64_t out_features) : LinearImpl(LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(LinearOptions options);

  at::Tensor forward(const at::Tensor& x);  // [..., in_features] -> [..., out_features]

  void reset() override;
  void reset_parameters();
  void bind_members();
  bool takes(const std::string& name, const at::Tensor& tensor) const override;
  void pretty_print(std::ostream& stream) const override;

  LinearOptions options;
  at::Tensor weight;  // [out_features, in_features], or stored blocks of it (ops/stored_linear.h), without gradients
  at::Tensor bias;    // [out_features], undefined without bias
  std::shared_ptr<const LinearShare> share;
};
TORCH_MODULE(Linear);

// The result of each layer for x. The weights are streamed in one go. x enters the share of the first layer for all.
std::vector<at::Tensor> forward_all(const at::Tensor& x, std::initializer_list<const LinearImpl*> layers);

struct EmbeddingOptions : OptionList<EmbeddingOptions> {
  EmbeddingOptions(int64_t vocab_size, int64_t embed_dim) : vocab_size_(vocab_size), embed_dim_(embed_dim) {}
  ATTNPACK_OPTION(int64_t, vocab_size);
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(Factory, factory);
};

// How an embedding runs when its rows are sharded over processes (distributed/tensor_parallel.h). `local` are the rows
// of this process.
class EmbeddingShare {
 public:
  virtual ~EmbeddingShare() = default;
  // The rows of ids, as EmbeddingImpl::look_up.
  virtual at::Tensor look_up(const char* name, const at::Tensor& ids, const at::Tensor& local) const = 0;
  // x times all rows, as EmbeddingImpl::logits.
  virtual at::Tensor logits(const at::Tensor& x, const at::Tensor& local) const = 0;
  // The tokens that one process has chosen, on all of them.
  virtual at::Tensor agreed(const at::Tensor& tokens) const = 0;
};

// Whether a tensor is a weight [rows, columns], as numbers or in stored blocks.
bool holds_weight(const at::Tensor& tensor, int64_t rows, int64_t columns);

// Rows of a table by token id, initialised N(0, 1) as torch's.
class EmbeddingImpl : public LeafModule<EmbeddingImpl> {
 public:
  EmbeddingImpl(int64_t vocab_size, int64_t embed_dim) : EmbeddingImpl(EmbeddingOptions(vocab_size, embed_dim)) {}
  explicit EmbeddingImpl(EmbeddingOptions options);

  at::Tensor forward(const at::Tensor& ids) { return look_up("ids", ids); }  // [B, L] int32 or int64 -> [B, L, E]
  // The same; errors call ids by the name that the caller's users know.
  at::Tensor look_up(const char* name, const at::Tensor& ids);
  // The table as the head of a model: x times each row. [..., E] -> [..., vocab_size]
  at::Tensor logits(const at::Tensor& x) const;

  void reset() override;
  void bind_members() { weight = parameters_["weight"]; }
  bool takes(const std::string& name, const at::Tensor& tensor) const override;
  void pretty_print(std::ostream& stream) const override;

  EmbeddingOptions options;
  at::Tensor weight;  // [vocab_size, E], or stored blocks of it; rows of stored blocks come in fp32
  std::shared_ptr<const EmbeddingShare> share;
};
TORCH_MODULE(Embedding);

}  // namespace attnpack
