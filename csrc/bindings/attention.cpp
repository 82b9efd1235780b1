#include <attnpack/modules/grouped_attention.h>
#include <attnpack/modules/latent_attention.h>
#include <attnpack/modules/projected_attention.h>
#include <attnpack/modules/self_attention.h>
#include <bindings/common.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

using Rope = std::shared_ptr<RotaryEmbeddingImpl>;
using Cache = std::shared_ptr<KVCache>;

RotaryEmbedding as_holder(const Rope& rope) { return rope ? RotaryEmbedding(rope) : RotaryEmbedding(nullptr); }

// Returns out, or (out, weights) if need_weights. The calls run without the GIL.
template <typename Plain, typename Weighted>
py::object run(bool need_weights, const Plain& plain, const Weighted& weighted) {
  if (!need_weights) {
    at::Tensor out = [&] {
      py::gil_scoped_release released;
      return plain();
    }();
    return py::cast(out);
  }
  auto both = [&] {
    py::gil_scoped_release released;
    return weighted();
  }();
  return py::cast(both);
}

// forward, forward_with_weights and project of a module that is called with x and a context.
template <typename Class>
void bind_forward(Class& cls) {
  using Impl = typename Class::type;
  cls.def(
         "forward",
         [](Impl& self, const at::Tensor& x, const OptionalTensor& context, const OptionalTensor& value_context,
            const OptionalTensor& mask, std::optional<bool> causal, const Cache& cache, const OptionalTensor& positions,
            const OptionalTensor& kv_lens, bool need_weights) {
           auto inputs = AttentionInputs()
                             .context(context)
                             .value_context(value_context)
                             .mask(mask)
                             .causal(causal)
                             .cache(cache)
                             .positions(positions)
                             .kv_lens(kv_lens);
           return run(
               need_weights, [&] { return self.forward(x, inputs); },
               [&] { return self.forward_with_weights(x, inputs); });
         },
         py::arg("x"), py::arg("context") = py::none(), py::kw_only(), py::arg("value_context") = py::none(),
         py::arg("mask") = py::none(), py::arg("causal") = py::none(), py::arg("cache") = py::none(),
         py::arg("positions") = py::none(), py::arg("kv_lens") = py::none(), py::arg("need_weights") = false)
      .def("forward_with_weights",
           [](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
             return self.attr("forward")(*args, **kwargs, py::arg("need_weights") = true);
           })
      .def(
          "project",
          [](Impl& self, const at::Tensor& x, const OptionalTensor& context, const OptionalTensor& positions) {
            return self.project(x, AttentionInputs().context(context).positions(positions));
          },
          py::arg("x"), py::arg("context") = py::none(), py::kw_only(), py::arg("positions") = py::none(),
          py::call_guard<py::gil_scoped_release>());
}

// MultiHeadAttention and its two siblings differ in the sizes that stand before the keywords.
template <typename Impl, typename Options, typename... Sizes, typename... Names>
void bind_family(py::module_& m, const char* name, const char* doc, const Names&... sizes) {
  auto cls = bind_module<Impl>(m, name, doc);
  cls.def(py::init([](Sizes... sizes, std::optional<std::vector<int64_t>> head_map, std::optional<int64_t> head_dim,
                      std::optional<int64_t> kdim, std::optional<int64_t> vdim, bool bias, std::optional<bool> out_bias,
                      double dropout, bool causal, std::optional<Window> window, double softcap, bool sinks, bool alibi,
                      bool qk_norm, const Rope& rope, std::optional<double> scale, const py::object& device,
                      const py::object& dtype) {
            return Impl(Options(sizes...)
                            .head_map(std::move(head_map))
                            .head_dim(head_dim)
                            .kdim(kdim)
                            .vdim(vdim)
                            .bias(bias)
                            .out_bias(out_bias)
                            .dropout(dropout)
                            .causal(causal)
                            .window(window)
                            .softcap(softcap)
                            .sinks(sinks)
                            .alibi(alibi)
                            .qk_norm(qk_norm)
                            .rope(as_holder(rope))
                            .scale(scale)
                            .factory(make_factory(device, dtype)));
          }),
          sizes..., py::kw_only(), py::arg("head_map") = py::none(), py::arg("head_dim") = py::none(),
          py::arg("kdim") = py::none(), py::arg("vdim") = py::none(), py::arg("bias") = false,
          py::arg("out_bias") = py::none(), py::arg("dropout") = 0.0, py::arg("causal") = false,
          py::arg("window") = py::none(), py::arg("softcap") = 0.0, py::arg("sinks") = false, py::arg("alibi") = false,
          py::arg("qk_norm") = false, py::arg("rope") = py::none(), py::arg("scale") = py::none(),
          py::arg("device") = py::none(), py::arg("dtype") = py::none());
  bind_forward(cls);
}

void bind_latent(py::module_& m) {
  using Impl = MultiHeadLatentAttentionImpl;
  auto cls = bind_module<Impl>(m, "MultiHeadLatentAttention", "Keys and values are made of one cached latent a token.");
  cls.def(py::init([](int64_t embed_dim, int64_t num_heads, int64_t kv_lora_rank, std::optional<int64_t> q_lora_rank,
                      int64_t qk_nope_head_dim, int64_t qk_rope_head_dim, int64_t v_head_dim, const Rope& rope,
                      bool latent_norm, bool bias, double dropout, bool causal, std::optional<double> scale,
                      const std::string& path, bool folded, const py::object& device, const py::object& dtype) {
            return Impl(MultiHeadLatentAttentionOptions(embed_dim, num_heads)
                            .kv_lora_rank(kv_lora_rank)
                            .q_lora_rank(q_lora_rank)
                            .qk_nope_head_dim(qk_nope_head_dim)
                            .qk_rope_head_dim(qk_rope_head_dim)
                            .v_head_dim(v_head_dim)
                            .rope(as_holder(rope))
                            .latent_norm(latent_norm)
                            .bias(bias)
                            .dropout(dropout)
                            .causal(causal)
                            .scale(scale)
                            .path(path)
                            .folded(folded)
                            .factory(make_factory(device, dtype)));
          }),
          py::arg("embed_dim"), py::arg("num_heads"), py::kw_only(), py::arg("kv_lora_rank"),
          py::arg("q_lora_rank") = py::none(), py::arg("qk_nope_head_dim"), py::arg("qk_rope_head_dim"),
          py::arg("v_head_dim"), py::arg("rope") = py::none(), py::arg("latent_norm") = true, py::arg("bias") = false,
          py::arg("dropout") = 0.0, py::arg("causal") = false, py::arg("scale") = py::none(), py::arg("path") = "auto",
          py::arg("folded") = false, py::arg("device") = py::none(), py::arg("dtype") = py::none())
      .def_property_readonly("softmax_scale", &Impl::softmax_scale)
      .def("fold", &Impl::fold);
  bind_forward(cls);
}

void bind_projected(py::module_& m) {
  using Impl = ProjectedAttentionImpl;
  bind_module<Impl>(m, "ProjectedAttention", "Attention over q, k, v that are given; no parameters.")
      .def(py::init([](int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                       std::optional<std::vector<int64_t>> head_map, double dropout, bool causal,
                       std::optional<Window> window, double softcap, const Rope& rope, std::optional<double> scale,
                       const py::object&, const py::object&) {
             return Impl(ProjectedAttentionOptions(num_heads, num_kv_heads, head_dim)
                             .head_map(head_map)
                             .dropout(dropout)
                             .causal(causal)
                             .window(window)
                             .softcap(softcap)
                             .rope(as_holder(rope))
                             .scale(scale));
           }),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::kw_only(),
           py::arg("head_map") = py::none(), py::arg("dropout") = 0.0, py::arg("causal") = false,
           py::arg("window") = py::none(), py::arg("softcap") = 0.0, py::arg("rope") = py::none(),
           py::arg("scale") = py::none(), py::arg("device") = py::none(), py::arg("dtype") = py::none())
      .def(
          "forward",
          [](Impl& self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
             std::optional<bool> causal, const Cache& cache, const OptionalTensor& positions,
             const OptionalTensor& kv_lens, bool need_weights) {
            auto inputs =
                AttentionInputs().mask(mask).causal(causal).cache(cache).positions(positions).kv_lens(kv_lens);
            return run(
                need_weights, [&] { return self.forward(q, k, v, inputs); },
                [&] { return self.forward_with_weights(q, k, v, inputs); });
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::kw_only(), py::arg("mask") = py::none(),
          py::arg("causal") = py::none(), py::arg("cache") = py::none(), py::arg("positions") = py::none(),
          py::arg("kv_lens") = py::none(), py::arg("need_weights") = false)
      .def(
          "project",
          [](Impl& self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
             const OptionalTensor& positions) { return self.project(q, k, v, AttentionInputs().positions(positions)); },
          py::arg("q"), py::arg("k"), py::arg("v"), py::kw_only(), py::arg("positions") = py::none(),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void register_attention(py::module_& m) {
  auto self_attention = bind_module<SelfAttentionImpl>(m, "SelfAttention", "One head, no output projection.");
  self_attention.def(
      py::init([](int64_t embed_dim, std::optional<int64_t> head_dim, bool bias, bool causal, const py::object& device,
                  const py::object& dtype) {
        return SelfAttentionImpl(SelfAttentionOptions(embed_dim).head_dim(head_dim).bias(bias).causal(causal).factory(
            make_factory(device, dtype)));
      }),
      py::arg("embed_dim"), py::arg("head_dim") = py::none(), py::kw_only(), py::arg("bias") = false,
      py::arg("causal") = false, py::arg("device") = py::none(), py::arg("dtype") = py::none());
  bind_forward(self_attention);
  const py::arg embed_dim("embed_dim"), num_heads("num_heads"), num_kv_heads("num_kv_heads");
  bind_family<MultiHeadAttentionImpl, MultiHeadAttentionOptions, int64_t, int64_t>(
      m, "MultiHeadAttention", "Every query head has its own kv head.", embed_dim, num_heads);
  bind_family<GroupedQueryAttentionImpl, GroupedQueryAttentionOptions, int64_t, int64_t, int64_t>(
      m, "GroupedQueryAttention", "Groups of query heads share a kv head.", embed_dim, num_heads, num_kv_heads);
  bind_family<MultiQueryAttentionImpl, MultiQueryAttentionOptions, int64_t, int64_t>(
      m, "MultiQueryAttention", "All query heads share one kv head.", embed_dim, num_heads);
  bind_latent(m);
  bind_projected(m);
}

}  // namespace attnpack
