#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/ops/option_list.h>

#include <optional>
#include <string>
#include <vector>

namespace attnpack {

// How query heads read kv heads: each its own, in groups of which there are num_kv_heads, or all the same one.
enum class HeadLayout { kMultiHead, kGroupedQuery, kMultiQuery };

// Options of the family; MultiHeadAttentionOptions and the other two below are the names to use.
template <HeadLayout layout>
struct GroupedOptions : OptionList<GroupedOptions<layout>> {
  GroupedOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads), num_kv_heads_(layout == HeadLayout::kMultiQuery ? 1 : num_heads) {
    static_assert(layout != HeadLayout::kGroupedQuery,
                  "GroupedQueryAttentionOptions(embed_dim, num_heads, num_kv_heads)");
  }
  GroupedOptions(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads), num_kv_heads_(num_kv_heads) {
    static_assert(layout == HeadLayout::kGroupedQuery, "only GroupedQueryAttentionOptions takes num_kv_heads");
  }
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION_IF(layout == HeadLayout::kGroupedQuery, int64_t, num_kv_heads);
  // kv head read by each query head, for uneven groups; default: consecutive heads share one.
  ATTNPACK_OPTION(std::optional<std::vector<int64_t>>, head_map);
  // Default embed_dim / num_heads.
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);
  // Widths of context and value_context; default embed_dim.
  ATTNPACK_OPTION(std::optional<int64_t>, kdim);
  ATTNPACK_OPTION(std::optional<int64_t>, vdim);
  ATTNPACK_OPTION(bool, bias) = false;
  // Default: as bias.
  ATTNPACK_OPTION(std::optional<bool>, out_bias);
  // Dropout of the probabilities, in training.
  ATTNPACK_OPTION(double, dropout) = 0.0;
  ATTNPACK_OPTION(bool, causal) = false;
  // How many keys before and after its own position each token sees, -1 for all.
  ATTNPACK_OPTION(std::optional<Window>, window);
  // Each token sees only its own chunk of so many positions (Llama 4).
  ATTNPACK_OPTION(std::optional<int64_t>, chunk);
  // c > 0: scores become c * tanh(score / c).
  ATTNPACK_OPTION(double, softcap) = 0.0;
  // A learned logit per head that joins the softmax denominator only; parameter sinks [num_heads], 0 at first.
  ATTNPACK_OPTION(bool, sinks) = false;
  // Scores fall by alibi_slopes * distance (layers/alibi.h).
  ATTNPACK_OPTION(bool, alibi) = false;
  // RMSNorm on q and k before RoPE (or behind it): true, over head_dim with eps 1e-6, or a QkNorm.
  ATTNPACK_OPTION(QkNorm, qk_norm);
  // There is no v_proj: the values are the projected keys, before rotation. With qk_norm they are normed without
  // weights (Gemma 4).
  ATTNPACK_OPTION(bool, keys_as_values) = false;
  // false: there are no k_proj, v_proj and k_norm; forward reads the keys and values of kv_from.
  ATTNPACK_OPTION(bool, own_keys) = true;
  // Queries come of a latent of this width: q_a_proj, q_a_layernorm (eps 1e-6) and q_b_proj stand in the place of
  // q_proj (multi-matrix factorisation attention, Hu et al. 2024, arXiv 2412.19255). bias is then on q_a_proj.
  ATTNPACK_OPTION(std::optional<int64_t>, q_lora_rank);
  // gate_proj(x) through gate_activation is a factor on the outputs before o_proj: "head", one per head, or "element",
  // one per number (layers/gate_heads.h). gate_proj has no bias.
  ATTNPACK_OPTION(std::optional<std::string>, gate);
  ATTNPACK_OPTION(std::string, gate_activation) = "sigmoid";
  ATTNPACK_OPTION(RotaryEmbedding, rope) = nullptr;
  // Default 1 / sqrt(head_dim).
  ATTNPACK_OPTION(std::optional<double>, scale);
  // The scores of a query grow with its position (layers/query_factors.h).
  ATTNPACK_OPTION(std::optional<QueryScale>, query_scale);
  ATTNPACK_OPTION(Factory, factory);
};

// Projections, then attend: multi-head (Vaswani et al. 2017), grouped-query (Ainslie et al. 2023) and multi-query
// attention (Shazeer 2019) differ only in num_kv_heads.
template <typename Derived, HeadLayout layout>
class GroupedAttentionImpl : public LeafModule<Derived>, public AttentionModule {
 public:
  explicit GroupedAttentionImpl(GroupedOptions<layout> given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                          const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& x,
                                                         const AttentionInputs& inputs = {}) override;
  int64_t embed_dim() const override { return options.embed_dim(); }
  bool rotates() const override { return !rope.is_empty(); }
  bool counts_distances() const override {
    return options.alibi() || options.chunk() || options.window().value_or(Window{-1, -1}) != Window{-1, -1};
  }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void bind_members() { sinks = options.sinks() ? this->parameters_["sinks"] : at::Tensor(); }

  GroupedOptions<layout> options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr}, gate_proj{nullptr};
  Linear q_a_proj{nullptr}, q_b_proj{nullptr};  // with q_lora_rank, in the place of q_proj
  RMSNorm q_a_layernorm{nullptr};
  RMSNorm q_norm{nullptr}, k_norm{nullptr};
  RotaryEmbedding rope{nullptr};
  at::Tensor sinks;            // [num_heads], undefined without sinks
  std::vector<double> slopes;  // [num_heads], of ALiBi, not rounded by .to(kBFloat16)

 protected:
  // The name and the options, for pretty_print.
  void print(std::ostream& stream, const char* name) const;

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})

 private:
  friend struct AttentionSteps;

  // Whether the heads are rotated here and then normed; otherwise the layer's op rotates them.
  bool norms_rotated() const { return options.qk_norm() && options.qk_norm().after_rope(); }
  // The module's output over the keys of inputs.kv, into which the first layer puts its own.
  at::Tensor attend_over(const at::Tensor& x, const AttentionInputs& inputs);
  // The projection that reads x for the queries.
  const Linear& reads_x() const { return q_proj ? q_proj : q_a_proj; }
  // q [B, Hq, L, D], normed, not rotated; with a norm behind the rotation both.
  at::Tensor queries(const at::Tensor& x, const AttentionInputs& inputs);
  // v [B, Hkv, L, D] of the projected values.
  at::Tensor values(const at::Tensor& x) const;
  // The module's output of the joined heads.
  at::Tensor output(const at::Tensor& joined, const at::Tensor& x);
  // The options of attention over the cache of another layer.
  AttendOptions shared_settings(const at::Tensor& x, const AttentionInputs& inputs) const;
  // q as queries() gives it, k [B, Hkv, Lkv, D] alike, v [B, Hkv, Lkv, D].
  std::tuple<at::Tensor, at::Tensor, at::Tensor> heads(const at::Tensor& x, const AttentionInputs& inputs);
  // [B, L, heads * D] -> [B, heads, L, D], normed, if the norm stands before the rotation.
  at::Tensor split(const at::Tensor& x, int64_t heads, RMSNorm& norm) const;
  // [B, heads, L, D] rotated at positions int64 [L] or [B, L] and normed, if the norm stands behind the rotation.
  at::Tensor rotated(const at::Tensor& heads, const at::Tensor& positions, RMSNorm& norm) const;
  // [..., D] over D, by the norm's weights or without any.
  at::Tensor normed(const at::Tensor& heads, RMSNorm& norm) const;
  AttendOptions settings(const AttentionInputs& inputs) const;
};

using MultiHeadAttentionOptions = GroupedOptions<HeadLayout::kMultiHead>;
using GroupedQueryAttentionOptions = GroupedOptions<HeadLayout::kGroupedQuery>;
using MultiQueryAttentionOptions = GroupedOptions<HeadLayout::kMultiQuery>;

// Multi-head attention, a kv head for each query head (Vaswani et al. 2017). Parameters q_proj, k_proj, v_proj
// [num_heads * D, width of the input], o_proj [embed_dim, num_heads * D].
class MultiHeadAttentionImpl : public GroupedAttentionImpl<MultiHeadAttentionImpl, HeadLayout::kMultiHead> {
 public:
  using GroupedAttentionImpl::GroupedAttentionImpl;
  MultiHeadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : GroupedAttentionImpl(MultiHeadAttentionOptions(embed_dim, num_heads)) {}
  void pretty_print(std::ostream& stream) const override { print(stream, "attnpack::MultiHeadAttention"); }
};
TORCH_MODULE(MultiHeadAttention);

// Groups of query heads share a kv head (Ainslie et al. 2023): k_proj and v_proj have num_kv_heads * D rows.
class GroupedQueryAttentionImpl : public GroupedAttentionImpl<GroupedQueryAttentionImpl, HeadLayout::kGroupedQuery> {
 public:
  using GroupedAttentionImpl::GroupedAttentionImpl;
  GroupedQueryAttentionImpl(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads)
      : GroupedAttentionImpl(GroupedQueryAttentionOptions(embed_dim, num_heads, num_kv_heads)) {}
  void pretty_print(std::ostream& stream) const override { print(stream, "attnpack::GroupedQueryAttention"); }
};
TORCH_MODULE(GroupedQueryAttention);

// All query heads share one kv head (Shazeer 2019): k_proj and v_proj have D rows.
class MultiQueryAttentionImpl : public GroupedAttentionImpl<MultiQueryAttentionImpl, HeadLayout::kMultiQuery> {
 public:
  using GroupedAttentionImpl::GroupedAttentionImpl;
  MultiQueryAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : GroupedAttentionImpl(MultiQueryAttentionOptions(embed_dim, num_heads)) {}
  void pretty_print(std::ostream& stream) const override { print(stream, "attnpack::MultiQueryAttention"); }
};
TORCH_MODULE(MultiQueryAttention);

}  // namespace attnpack
