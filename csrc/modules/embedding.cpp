#include <attnpack/modules/embedding.h>

#include <torch/nn/init.h>

namespace attnpack {

EmbeddingImpl::EmbeddingImpl(EmbeddingOptions options) : options(std::move(options)) { reset(); }

void EmbeddingImpl::reset() {
  register_parameter("weight", allocate({options.vocab_size(), options.embed_dim()}, weight, options.factory()));
  bind_members();
  torch::nn::init::normal_(weight);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) {
  TORCH_CHECK(ids.dim() == 2 && (ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt), "ids: got ",
              ids.scalar_type(), " of shape ", ids.sizes(),
              ", want int64 token numbers [B, L]; for one sequence pass ids.unsqueeze(0)");
  return at::embedding(weight, ids);
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "attnpack::Embedding(" << options.vocab_size() << ", " << options.embed_dim() << ")";
}

}  // namespace attnpack
