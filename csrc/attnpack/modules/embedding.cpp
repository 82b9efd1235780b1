#include <attnpack/modules/embedding.h>

#include <torch/nn/init.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>

namespace attnpack {

EmbeddingImpl::EmbeddingImpl(EmbeddingOptions options) : options(std::move(options)) { reset(); }

void EmbeddingImpl::reset() {
  check_size("vocab_size", options.vocab_size());
  check_size("embed_dim", options.embed_dim());
  register_parameter("weight", allocate({options.vocab_size(), options.embed_dim()}, weight, options.factory()));
  bind_members();
  // On meta there is nothing to draw, and torch's Python code for it imports Dynamo, which is slow.
  if (!weight.is_meta()) torch::nn::init::normal_(weight);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) {
  ATTNPACK_CHECK(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids has dtype ", ids.scalar_type(),
                 ", wants int64 token numbers: call .long() on it, in C++ .to(at::kLong)");
  ATTNPACK_CHECK(ids.dim() == 2, "ids: got shape ", ids.sizes(),
                 ", want token numbers [B, L]; for one sequence pass ids.unsqueeze(0)");
  check_device("ids", ids, weight);
  try {
    return at::embedding(weight, ids);
  } catch (const c10::IndexError&) {  // found while reading: a check of our own would make CUDA wait
    const auto vocab_size = weight.size(0);
    const auto outside = ids.masked_select((ids < 0).logical_or(ids >= vocab_size));
    ATTNPACK_CHECK(outside.numel() == 0, "ids holds ", outside[0].item<int64_t>(), ", wants 0 to ", vocab_size - 1,
                   ", the tokens of vocab_size ", vocab_size, ": use the tokenizer that belongs to the model");
    throw;
  }
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::Embedding", options); }

}  // namespace attnpack
