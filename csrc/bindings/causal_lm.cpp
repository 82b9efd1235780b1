#include <attnpack/models/generate.h>
#include <bindings/common.h>
#include <bindings/register.h>
#include <bindings/rope_scaling.h>

namespace attnpack {

namespace {

using ModelCachePtr = std::shared_ptr<ModelCache>;

at::Tensor generate_py(CausalLMImpl& self, const at::Tensor& ids, int64_t max_new_tokens, const py::object& cache,
                       const OptionalTensor& lengths, const std::variant<std::vector<int64_t>, int64_t>& stop_tokens,
                       std::optional<double> temperature, std::optional<int64_t> top_k, std::optional<double> top_p,
                       std::optional<uint64_t> seed, const py::object& callback) {
  GenerateOptions options(max_new_tokens);
  const auto* one = std::get_if<int64_t>(&stop_tokens);
  options.stop_tokens(one ? std::vector<int64_t>{*one} : std::get<0>(stop_tokens));
  options.lengths(lengths).temperature(temperature).top_k(top_k).top_p(top_p).seed(seed);
  if (py::isinstance<py::str>(cache)) {
    options.cache(cache.cast<std::string>());
  } else {
    TORCH_CHECK_TYPE(py::isinstance<ModelCache>(cache), "attnpack: cache is ", shown(cache),
                     ", generate wants 'dynamic', 'static', 'none' (everything is computed anew for each token) or a "
                     "ModelCache");
    options.model_cache(cache.cast<ModelCachePtr>());
  }
  TORCH_CHECK_TYPE(callback.is_none() || PyCallable_Check(callback.ptr()), "attnpack: callback is ", shown(callback),
                   ", wants a function of each step's tokens [B], or None");
  // Each step takes the GIL once: for Ctrl-C, and for the callback, which goes on unless it returns False.
  options.callback([&callback](const at::Tensor& tokens) {
    py::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return callback.is_none() || !callback(tokens).is(py::bool_(false));
  });
  py::gil_scoped_release released;
  return generate(self, ids, options);
}

// The keywords of MultiHeadLatentAttention that are not the model's, or None.
std::optional<MultiHeadLatentAttentionOptions> parse_latent(const py::object& latent) {
  if (latent.is_none()) return std::nullopt;
  const char* wanted =
      "None or a dict such as {'kv_lora_rank': 64, 'qk_nope_head_dim': 32, 'qk_rope_head_dim': 16, "
      "'v_head_dim': 32}";
  TORCH_CHECK_TYPE(py::isinstance<py::dict>(latent), "attnpack: latent is ", shown(latent), ", wants ", wanted);
  MultiHeadLatentAttentionOptions result(1, 1);
  for (const auto& [key, value] : latent.cast<py::dict>()) {
    const auto name = py::str(key).cast<std::string>();
    const auto held = py::reinterpret_borrow<py::object>(value);
    const auto size = [&] {
      if (held.is_none()) return std::optional<int64_t>();
      TORCH_CHECK_TYPE(PyIndex_Check(held.ptr()) && !py::isinstance<py::bool_>(held), "attnpack: latent: ", name,
                       " is ", shown(held), ", wants an int");
      return std::optional<int64_t>(py::int_(held).cast<int64_t>());
    };
    if (name == "kv_lora_rank") {
      result.kv_lora_rank(size());
    } else if (name == "q_lora_rank") {
      result.q_lora_rank(size());
    } else if (name == "qk_nope_head_dim") {
      result.qk_nope_head_dim(size());
    } else if (name == "qk_rope_head_dim") {
      result.qk_rope_head_dim(size());
    } else if (name == "v_head_dim") {
      result.v_head_dim(size());
    } else if (name == "latent_norm") {
      TORCH_CHECK_TYPE(py::isinstance<py::bool_>(held), "attnpack: latent: latent_norm is ", shown(held),
                       ", wants True or False");
      result.latent_norm(held.cast<bool>());
    } else if (name == "path") {
      TORCH_CHECK_TYPE(py::isinstance<py::str>(held), "attnpack: latent: path is ", shown(held),
                       ", wants 'auto', 'expanded' or 'absorbed'");
      result.path(held.cast<std::string>());
    } else {
      TORCH_CHECK_VALUE(false, "attnpack: latent: got '", name,
                        "', want keywords of MultiHeadLatentAttention that are "
                        "not the model's: ranks, head dims, latent_norm and path");
    }
  }
  return result;
}

}  // namespace

void register_causal_lm(py::module_& m) {
  bind_module<CausalLMImpl>(m, "CausalLM", "A decoder-only language model with Llama's layers and names.")
      .def(py::init([](int64_t vocab_size, int64_t embed_dim, int64_t num_layers, int64_t num_heads,
                       std::optional<int64_t> num_kv_heads, std::optional<int64_t> head_dim,
                       std::optional<int64_t> hidden_dim, int64_t max_positions, double rope_base,
                       const py::object& rope_scaling, double eps, bool tie_embeddings, double init_std, bool qk_norm,
                       std::optional<Window> window, bool bias, std::optional<bool> out_bias, bool mlp_bias,
                       bool rope_interleaved, const py::object& latent, const py::object& device,
                       const py::object& dtype) {
             return CausalLMImpl(CausalLMOptions(vocab_size, embed_dim, num_layers, num_heads)
                                     .num_kv_heads(num_kv_heads)
                                     .head_dim(head_dim)
                                     .hidden_dim(hidden_dim)
                                     .max_positions(max_positions)
                                     .rope_base(rope_base)
                                     .rope_scaling(parse_scaling(rope_scaling))
                                     .eps(eps)
                                     .tie_embeddings(tie_embeddings)
                                     .init_std(init_std)
                                     .qk_norm(qk_norm)
                                     .window(window)
                                     .bias(bias)
                                     .out_bias(out_bias)
                                     .mlp_bias(mlp_bias)
                                     .rope_interleaved(rope_interleaved)
                                     .latent(parse_latent(latent))
                                     .factory(make_factory(device, dtype)));
           }),
           py::arg("vocab_size"), py::arg("embed_dim"), py::arg("num_layers"), py::arg("num_heads"),
           py::arg("num_kv_heads") = py::none(), py::kw_only(), py::arg("head_dim") = py::none(),
           py::arg("hidden_dim") = py::none(), py::arg("max_positions") = 2048, py::arg("rope_base") = 10000.0,
           py::arg("rope_scaling") = py::none(), py::arg("eps") = 1e-6, py::arg("tie_embeddings") = false,
           py::arg("init_std") = 0.02, py::arg("qk_norm") = false, py::arg("window") = py::none(),
           py::arg("bias") = false, py::arg("out_bias") = py::none(), py::arg("mlp_bias") = false,
           py::arg("rope_interleaved") = false, py::arg("latent") = py::none(), py::arg("device") = py::none(),
           py::arg("dtype") = py::none())
      .def(
          "forward",
          [](CausalLMImpl& self, const at::Tensor& ids, const ModelCachePtr& cache, const OptionalTensor& mask,
             const OptionalTensor& positions, const OptionalTensor& lengths) {
            return self.forward(ids, CausalLMInputs().cache(cache).mask(mask).positions(positions).lengths(lengths));
          },
          py::arg("ids"), py::arg("cache") = py::none(), py::kw_only(), py::arg("mask") = py::none(),
          py::arg("positions") = py::none(), py::arg("lengths") = py::none(), py::call_guard<py::gil_scoped_release>())
      .def("generate", &generate_py, py::arg("ids"), py::kw_only(), py::arg("max_new_tokens"),
           py::arg("cache") = "dynamic", py::arg("lengths") = py::none(),
           py::arg("stop_tokens") = std::vector<int64_t>(), py::arg("temperature") = py::none(),
           py::arg("top_k") = py::none(), py::arg("top_p") = py::none(), py::arg("seed") = py::none(),
           py::arg("callback") = py::none());
}

}  // namespace attnpack
