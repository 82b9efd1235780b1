#include <attnpack/modules/linear.h>

#include <torch/nn/init.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/stored_linear.h>

namespace attnpack {

EmbeddingImpl::EmbeddingImpl(EmbeddingOptions options) : options(std::move(options)) { reset(); }

void EmbeddingImpl::reset() {
  check_size("vocab_size", options.vocab_size());
  check_size("embed_dim", options.embed_dim());
  if (is_stored(weight))  // of the module that this one is cloned from
    register_parameter("weight", at::empty_like(weight), /*requires_grad=*/false);
  else
    register_parameter("weight", allocate("vocab_size and embed_dim", {options.vocab_size(), options.embed_dim()},
                                          weight, options.factory()));
  bind_members();
  // On meta there is nothing to draw, and torch's Python code for it imports Dynamo, which is slow.
  if (!weight.is_meta() && !is_stored(weight)) torch::nn::init::normal_(weight);
}

at::Tensor EmbeddingImpl::look_up(const char* name, const at::Tensor& ids) {
  check_ids(name, ids);
  check_device(name, ids, weight);
  if (share) return share->look_up(name, ids, weight);
  try {
    return is_stored(weight) ? stored_rows(weight, ids, at::kFloat) : at::embedding(weight, ids);
  } catch (const c10::IndexError&) {
    check_vocabulary(name, ids, weight.size(0));
    throw;
  }
}

at::Tensor EmbeddingImpl::logits(const at::Tensor& x) const {
  if (share) return share->logits(x, weight);
  return is_stored(weight) ? stored_linear(x, weight) : attnpack::linear(x, weight);
}

bool EmbeddingImpl::takes(const std::string& name, const at::Tensor& tensor) const {
  return name == "weight" && !share && holds_weight(tensor, options.vocab_size(), options.embed_dim());
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::Embedding", options); }

}  // namespace attnpack
