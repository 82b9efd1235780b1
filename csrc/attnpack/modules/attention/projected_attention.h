#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct ProjectedAttentionOptions : OptionList<ProjectedAttentionOptions> {
  ProjectedAttentionOptions(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
      : num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {}
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION(int64_t, num_kv_heads);
  ATTNPACK_OPTION(int64_t, head_dim);
  // kv head read by each query head, for uneven groups; default: consecutive heads share one.
  ATTNPACK_OPTION(std::optional<std::vector<int64_t>>, head_map);
  ATTNPACK_OPTION(double, dropout) = 0.0;
  ATTNPACK_OPTION(bool, causal) = false;
  ATTNPACK_OPTION(std::optional<Window>, window);
  ATTNPACK_OPTION(double, softcap) = 0.0;
  ATTNPACK_OPTION(RotaryEmbedding, rope) = nullptr;
  ATTNPACK_OPTION(std::optional<double>, scale);
};

// Attention over q, k and v that somebody else projected; no parameters.
class ProjectedAttentionImpl : public torch::nn::Cloneable<ProjectedAttentionImpl> {
 public:
  ProjectedAttentionImpl(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
      : ProjectedAttentionImpl(ProjectedAttentionOptions(num_heads, num_kv_heads, head_dim)) {}
  explicit ProjectedAttentionImpl(ProjectedAttentionOptions given) : options(std::move(given)) { reset(); }

  // -> [B, L, Hq * D]. inputs.context stays unset. Keys of another length than q come from another sequence: RoPE
  // rotates them at 0..Lkv-1.
  at::Tensor forward(const at::Tensor& q,  // [B, L, Hq * D]
                     const at::Tensor& k,  // [B, Lkv, Hkv * D]
                     const at::Tensor& v,  // [B, Lkv, Hkv * D]
                     const AttentionInputs& inputs = {});
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                          const AttentionInputs& inputs = {});
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                         const AttentionInputs& inputs = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  ProjectedAttentionOptions options;
  RotaryEmbedding rope{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(AttentionInputs())})

 private:
  std::tuple<at::Tensor, at::Tensor, at::Tensor> heads(const at::Tensor& q, const at::Tensor& k,
                                                       const at::Tensor& v) const;
  AttendOptions settings(const at::Tensor& query, const at::Tensor& key, const AttentionInputs& inputs) const;
};
TORCH_MODULE(ProjectedAttention);

}  // namespace attnpack
