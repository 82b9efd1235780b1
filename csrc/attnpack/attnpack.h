#pragma once

// The umbrella for C++ users: LibTorch, the operators, the caches and the modules. C++17.
#include <torch/torch.h>

#include <attnpack/backend/linear.h>
#include <attnpack/backend/sdpa.h>
#include <attnpack/cache/cross_cache.h>
#include <attnpack/cache/indexed_cache.h>
#include <attnpack/cache/latent_cache.h>
#include <attnpack/cache/model_cache.h>
#include <attnpack/cache/paged_cache.h>
#include <attnpack/cache/quantized_cache.h>
#include <attnpack/cache/recurrent_cache.h>
#include <attnpack/cache/sliding_window_cache.h>
#include <attnpack/cache/sparse_cache.h>
#include <attnpack/convert/from_torch.h>
#include <attnpack/convert/fused.h>
#include <attnpack/convert/latent_conversion.h>
#include <attnpack/convert/models.h>
#include <attnpack/convert/modules.h>
#include <attnpack/convert/pool.h>
#include <attnpack/convert/similar.h>
#include <attnpack/fwd.h>
#include <attnpack/layers/alibi.h>
#include <attnpack/layers/compressed.h>
#include <attnpack/layers/differential.h>
#include <attnpack/layers/gate_heads.h>
#include <attnpack/layers/recurrent.h>
#include <attnpack/layers/route_experts.h>
#include <attnpack/layers/select_keys.h>
#include <attnpack/models/from_gguf.h>
#include <attnpack/models/from_hf.h>
#include <attnpack/models/generate.h>
#include <attnpack/modules/attention/compressed_attention.h>
#include <attnpack/modules/attention/differential_attention.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/attention/latent_attention.h>
#include <attnpack/modules/attention/projected_attention.h>
#include <attnpack/modules/attention/self_attention.h>
#include <attnpack/modules/attention/sparse_attention.h>
#include <attnpack/modules/attention/sparse_latent_attention.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/mixture_of_experts.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/recurrent/gated_delta_net.h>
#include <attnpack/modules/recurrent/kimi_delta_attention.h>
#include <attnpack/modules/recurrent/linear_attention.h>
#include <attnpack/modules/recurrent/mamba2.h>
#include <attnpack/modules/recurrent/recurrent_module.h>
#include <attnpack/modules/recurrent/short_convolution.h>
#include <attnpack/modules/state_dict.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/attention_varlen.h>
#include <attnpack/ops/causal_conv1d.h>
#include <attnpack/ops/key_products.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/kv_cache_paged.h>
#include <attnpack/ops/library.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/linear_attention.h>
#include <attnpack/ops/merge_states.h>
#include <attnpack/ops/null.h>
#include <attnpack/ops/option_list.h>
#include <attnpack/ops/quantize.h>
#include <attnpack/ops/query_scale.h>
#include <attnpack/ops/register.h>
#include <attnpack/ops/rms_norm.h>
#include <attnpack/ops/rope.h>
#include <attnpack/ops/softcap.h>
#include <attnpack/ops/stored_linear.h>
#include <attnpack/ops/swiglu.h>
#include <attnpack/rope/sinusoidal.h>
#include <attnpack/version.h>
#include <attnpack/weights/safetensors.h>

namespace attnpack {
namespace {
[[maybe_unused]] const bool ops_registered = (register_ops(), true);
}
}  // namespace attnpack
