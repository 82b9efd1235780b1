#include <attnpack/modules/attention/compressed_attention.h>
#include <attnpack/modules/attention/differential_attention.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/attention/latent_attention.h>
#include <attnpack/modules/attention/projected_attention.h>
#include <attnpack/modules/attention/self_attention.h>
#include <attnpack/modules/attention/sparse_attention.h>
#include <attnpack/modules/attention/sparse_latent_attention.h>
#include <bindings/common.h>
#include <bindings/option_dicts.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

// The inputs of forward after its tensors, without the options that `skipped` names.
std::pair<AttentionInputs, bool> read_inputs(Arguments& arguments,
                                             Names skipped = {"index_cache", "key_index", "key_block"}) {
  skipped.push_back("cu_seqlens");  // of recurrent layers only
  AttentionInputs inputs;
  bool need_weights = false;
  arguments.read_options(inputs, skipped);
  arguments.read("need_weights", need_weights);
  arguments.finish();
  return {inputs, need_weights};
}

// out, or (out, weights) if need_weights.
template <typename Plain, typename Weighted>
py::object run(bool need_weights, const Plain& plain, const Weighted& weighted) {
  return need_weights ? py::cast(without_gil(weighted)) : py::cast(without_gil(plain));
}

// forward, forward_with_weights and project of a module that is called with x and a context.
template <typename Class>
void bind_forward(Class& cls) {
  using Impl = typename Class::type;
  constexpr bool kNamesBlocks = std::is_same_v<Impl, MultiHeadAttentionImpl> ||
                                std::is_same_v<Impl, GroupedQueryAttentionImpl> ||
                                std::is_same_v<Impl, MultiQueryAttentionImpl>;
  constexpr bool kNamesKeys = kNamesBlocks || std::is_same_v<Impl, MultiHeadLatentAttentionImpl>;
  Names names = option_names(AttentionInputs());
  for (const char* others : {"index_cache", "cu_seqlens"}) std::erase(names, others);
  if (!kNamesKeys) std::erase(names, "key_index");
  if (!kNamesBlocks) std::erase(names, "key_block");
  names.insert(names.begin(), "x");
  names.push_back("need_weights");
  bind_method(cls, "forward", names, 2, [](Impl& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>("x");
    const auto [inputs, need_weights] = kNamesBlocks ? read_inputs(arguments, {"index_cache"})
                                        : kNamesKeys ? read_inputs(arguments, {"index_cache", "key_block"})
                                                     : read_inputs(arguments);
    return run(
        need_weights, [&, &inputs = inputs] { return self.forward(x, inputs); },
        [&, &inputs = inputs] { return self.forward_with_weights(x, inputs); });
  });
  add_forward_with_weights(cls);
  bind_method(cls, "project", {"x", "context", "positions"}, 2, [](Impl& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>("x");
    AttentionInputs inputs;
    arguments.read("context", inputs.context());
    arguments.read("positions", inputs.positions());
    arguments.finish();
    return without_gil([&] { return self.project(x, inputs); });
  });
}

template <typename Impl, typename Options, typename... Sizes>
py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> bind_attention(py::module_& m, const char* name,
                                                                          const char* doc,
                                                                          size_t positional = sizeof...(Sizes),
                                                                          const Names& required = {}) {
  auto cls = bind_module<Impl>(m, name, doc);
  bind_options<Impl, Options, Sizes...>(cls, positional, required);
  bind_forward(cls);
  return cls;
}

void bind_projected(py::module_& m) {
  using Impl = ProjectedAttentionImpl;
  auto cls = bind_module<Impl>(m, "ProjectedAttention", "Attention over q, k, v that are given; no parameters.");
  bind_options<Impl, ProjectedAttentionOptions, int64_t, int64_t, int64_t>(cls);
  bind_method(cls, "forward",
              {"q", "k", "v", "mask", "causal", "cache", "positions", "kv_lens", "kv_from", "need_weights"}, 3,
              [](Impl& self, Arguments& arguments) {
                const auto q = arguments.require<at::Tensor>("q");
                const auto k = arguments.require<at::Tensor>("k");
                const auto v = arguments.require<at::Tensor>("v");
                const auto [inputs, need_weights] =
                    read_inputs(arguments, {"context", "value_context", "index_cache", "key_index", "key_block"});
                return run(
                    need_weights, [&, &inputs = inputs] { return self.forward(q, k, v, inputs); },
                    [&, &inputs = inputs] { return self.forward_with_weights(q, k, v, inputs); });
              });
  bind_method(cls, "project", {"q", "k", "v", "positions"}, 3, [](Impl& self, Arguments& arguments) {
    const auto q = arguments.require<at::Tensor>("q");
    const auto k = arguments.require<at::Tensor>("k");
    const auto v = arguments.require<at::Tensor>("v");
    AttentionInputs inputs;
    arguments.read("positions", inputs.positions());
    arguments.finish();
    return without_gil([&] { return self.project(q, k, v, inputs); });
  });
}

// Binds a module whose queries read the keys that a selector names.
template <typename Impl, typename Options, typename... Sizes>
py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> bind_selecting(py::module_& m, const char* name,
                                                                          const char* doc, const Names& required) {
  auto cls = bind_module<Impl>(m, name, doc);
  bind_options<Impl, Options, Sizes...>(cls, sizeof...(Sizes), required);
  bind_method(cls, "forward", {"x", "mask", "causal", "cache", "positions", "kv_lens", "index_cache", "need_weights"},
              1, [](Impl& self, Arguments& arguments) {
                const auto x = arguments.require<at::Tensor>("x");
                const auto [inputs, need_weights] =
                    read_inputs(arguments, {"context", "value_context", "kv_from", "key_index", "key_block"});
                return run(
                    need_weights, [&, &inputs = inputs] { return self.forward(x, inputs); },
                    [&, &inputs = inputs] { return self.forward_with_weights(x, inputs); });
              });
  add_forward_with_weights(cls);
  bind_method(cls, "project", {"x", "positions"}, 1, [](Impl& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>("x");
    AttentionInputs inputs;
    arguments.read("positions", inputs.positions());
    arguments.finish();
    return without_gil([&] { return self.project(x, inputs); });
  });
  bind_method(cls, "indexer_loss", {"x", "sparse", "mask", "causal", "positions", "kv_lens"}, 1,
              [](Impl& self, Arguments& arguments) {
                const auto x = arguments.require<at::Tensor>("x");
                bool sparse = false;
                AttentionInputs inputs;
                arguments.read("sparse", sparse);
                arguments.read("mask", inputs.mask());
                arguments.read("causal", inputs.causal());
                arguments.read("positions", inputs.positions());
                arguments.read("kv_lens", inputs.kv_lens());
                arguments.finish();
                return without_gil([&] { return self.indexer_loss(x, sparse, inputs); });
              });
  return cls;
}

void bind_compressed(py::module_& m) {
  using Impl = CompressedAttentionImpl;
  auto cls = bind_module<Impl>(m, "CompressedAttention", "A window of tokens, and entries for windows before it.");
  bind_options<Impl, CompressedAttentionOptions, int64_t, int64_t>(cls, 2,
                                                                   {"head_dim", "q_lora_rank", "o_lora_rank", "rope"});
  bind_method(cls, "forward", {"x"}, 1, [](Impl& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>("x");
    arguments.finish();
    return without_gil([&] { return self.forward(x); });
  });
}

template <typename Impl>
void bind_latent(py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> cls) {
  bind_property(cls, "softmax_scale", &Impl::softmax_scale);
  bind_method(cls, "fold", {}, 0, [](Impl& self, Arguments& arguments) {
    arguments.finish();
    return self.fold();
  });
}

}  // namespace

void register_attention(py::module_& m) {
  bind_attention<SelfAttentionImpl, SelfAttentionOptions, int64_t>(m, "SelfAttention",
                                                                   "One head, no output projection.", 2);
  bind_attention<MultiHeadAttentionImpl, MultiHeadAttentionOptions, int64_t, int64_t>(
      m, "MultiHeadAttention", "Every query head has its own kv head.");
  bind_attention<GroupedQueryAttentionImpl, GroupedQueryAttentionOptions, int64_t, int64_t, int64_t>(
      m, "GroupedQueryAttention", "Groups of query heads share a kv head.");
  bind_attention<MultiQueryAttentionImpl, MultiQueryAttentionOptions, int64_t, int64_t>(
      m, "MultiQueryAttention", "All query heads share one kv head.");
  bind_attention<DifferentialAttentionImpl, DifferentialAttentionOptions, int64_t, int64_t, int64_t>(
      m, "DifferentialAttention", "The difference of two softmaxes over the same values.");
  bind_projected(m);
  const Names sizes{"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"};
  bind_latent(bind_attention<MultiHeadLatentAttentionImpl, MultiHeadLatentAttentionOptions, int64_t, int64_t>(
      m, "MultiHeadLatentAttention", "Keys and values are made of one cached latent per token.", 2, sizes));
  const char* selects = "A query reads the keys that a selector names, and no others.";
  bind_selecting<SparseAttentionImpl, SparseAttentionOptions, int64_t, int64_t, int64_t>(m, "SparseAttention", selects,
                                                                                         {"top_k"});
  auto required = sizes;
  required.insert(required.end(), {"top_k", "q_lora_rank"});
  bind_latent(bind_selecting<SparseLatentAttentionImpl, SparseLatentAttentionOptions, int64_t, int64_t>(
      m, "SparseLatentAttention", "Latent attention over the keys that an indexer names.", required));
  bind_compressed(m);
}

}  // namespace attnpack
