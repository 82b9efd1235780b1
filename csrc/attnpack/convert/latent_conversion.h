#pragma once

#include <attnpack/convert/merge_heads.h>
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/state_dict.h>

#include <optional>
#include <vector>

namespace attnpack::convert {

// The conversion of a model's attention to latent attention, layer by layer, for models that are not in memory as a
// whole; models.h has that of a model. All layers rotate by the same frequencies, so a rope_dim below the whole is
// dealt out to the frequencies by what all layers lose: then learn() sees each layer first, and convert() follows.
class LatentConversion {
 public:
  // rope_dim: dims of the joined key that rotate; default those of all kv heads together, which is exact. length: as in
  // LatentOptions. Raises for a model with settings that latent attention cannot hold, by their names.
  LatentConversion(const CausalLMOptions& source, int64_t kv_lora_rank, std::optional<int64_t> rope_dim = std::nullopt,
                   int64_t length = 512);

  // Whether learn() must see all layers before the first convert().
  bool learns() const { return pairs_.empty(); }
  // tensors: a layer of the state dict, without the beginning model.layers.i. of their names. calibration: the input of
  // its attention on some text, [tokens, E]; default: all that its norm can give counts alike.
  void learn(const StateDict& tensors, const at::Tensor& calibration = {});
  // The layer's tensors with those of latent attention in the place of those of its attention.
  StateDict convert(const StateDict& tensors, const at::Tensor& calibration = {});
  // The options of the converted model.
  CausalLMOptions options();

 private:
  struct Layer;
  Layer open(const StateDict& tensors, const at::Tensor& calibration) const;
  const std::vector<int64_t>& pairs();

  CausalLMOptions source_;
  RopeSettings rope_;
  int64_t kv_lora_rank_, length_, rope_dim_ = 0;
  double scale_;
  std::vector<int64_t> pairs_;  // by frequency, once they are chosen
  at::Tensor losses_;
};

// The tensor of that name in the model without factors: embed_scale, residual_scale and logit_scale lie in its
// weights. Formats without such factors want that.
at::Tensor with_multipliers(const CausalLMOptions& options, const std::string& name, const at::Tensor& tensor);

}  // namespace attnpack::convert
