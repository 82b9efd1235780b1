#pragma once

#include <attnpack/convert/merge_heads.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/attention/latent_attention.h>

namespace attnpack::convert {

struct ToGqaOptions {
  // As in MergeOptions.
  TORCH_ARG(std::string, method) = "mean";
  TORCH_ARG(int64_t, window) = 1;
  TORCH_ARG(std::optional<Groups>, groups);
  TORCH_ARG(std::optional<uint64_t>, seed);
  TORCH_ARG(Calibration, calibration);
};

// A module with fewer kv heads. Everything else is as in module: settings, biases, norms, sinks, mode, dtype, device,
// requires_grad. It has parameters of its own; module stays as it is. Uneven groups give it a head_map. module is a
// MultiHeadAttention, a GroupedQueryAttention (whose kv heads are merged) or a MultiQueryAttention. The method is that
// of Ainslie et al. 2023, section 2.1.
template <typename Impl>
GroupedQueryAttention to_gqa(const torch::nn::ModuleHolder<Impl>& module, int64_t num_kv_heads,
                             const ToGqaOptions& options = {});

// The same with one kv head.
template <typename Impl>
MultiQueryAttention to_mqa(const torch::nn::ModuleHolder<Impl>& module, const ToGqaOptions& options = {});

struct ToMlaOptions {
  TORCH_ARG(Calibration, calibration);  // of a single layer
  // As in LatentOptions.
  TORCH_ARG(int64_t, length) = 512;
  // The dims of the shared key that rotate. Default: of a layer as many as a head rotates, of a model those of all kv
  // heads together.
  TORCH_ARG(std::optional<int64_t>, rope_dim);
  TORCH_ARG(at::Tensor, ids);  // of a model: a text, [rows, L]
};

// The layer as latent attention (latent.h): the plain form without norms. Its rope head is as wide as the dims that
// module rotates, with one pair for each frequency, or as rope_dim says. Raises where module has a setting that latent
// attention lacks: window, softcap, sinks, ALiBi, norms of queries and keys, contexts of other widths than embed_dim. A
// bias of q_proj needs a query latent as wide as q_proj.
template <typename Impl>
MultiHeadLatentAttention to_mla(const torch::nn::ModuleHolder<Impl>& module, int64_t kv_lora_rank,
                                const ToMlaOptions& options = {});

}  // namespace attnpack::convert
