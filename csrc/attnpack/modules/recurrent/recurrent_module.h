#pragma once

#include <attnpack/cache/recurrent_cache.h>
#include <attnpack/layers/recurrent.h>
#include <attnpack/modules/attention_module.h>

#include <tuple>

namespace attnpack {

// Base of the layers whose memory of a sequence is a state of fixed size. They stand in the place of self-attention:
// causal, with a RecurrentCache, and without positions. Padding goes to the right, and kv_lens says where it begins.
class RecurrentModule : public AttentionModule {
 public:
  // These raise: there are no probabilities, and no heads that enter the operator of attention.
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                          const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& x,
                                                         const AttentionInputs& inputs = {}) override;
  bool rotates() const override { return false; }
  std::shared_ptr<KVCache> new_cache() const override { return std::make_shared<RecurrentCache>(); }
};

}  // namespace attnpack
