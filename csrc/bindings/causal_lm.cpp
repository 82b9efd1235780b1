#include <attnpack/core/check.h>
#include <attnpack/models/detail/sampler.h>
#include <attnpack/models/generate.h>
#include <bindings/causal_lm_options.h>
#include <bindings/register.h>

#include <string>

namespace attnpack {

namespace {

using ModelCachePtr = std::shared_ptr<ModelCache>;

at::Tensor generate_py(CausalLMImpl& self, Arguments& arguments) {
  const auto ids = arguments.require<at::Tensor>("ids");
  GenerateOptions options(arguments.require<int64_t>("max_new_tokens"));
  if (const auto cache = arguments.take("cache"); cache && py::isinstance<py::str>(cache)) {
    options.cache(cache.cast<std::string>());
  } else if (cache) {
    TORCH_CHECK_TYPE(py::isinstance<ModelCache>(cache), "attnpack: cache is ", shown(cache),
                     ", generate wants 'dynamic', 'static', 'sliding', 'paged', 'int8', 'int4', 'none' (everything is "
                     "computed anew for each "
                     "token) or a ModelCache");
    options.model_cache(cache.cast<ModelCachePtr>());
  }
  if (const auto token = arguments.take("stop_tokens"))
    options.stop_tokens(PyIndex_Check(token.ptr())
                            ? std::vector<int64_t>{read_value<int64_t>("stop_tokens", token, "stop_tokens")}
                            : read_value<std::vector<int64_t>>("stop_tokens", token, "stop_tokens"));
  auto callback = arguments.take("callback");
  if (!callback) callback = py::none();
  if (!callback.is_none() && !PyCallable_Check(callback.ptr()))
    raise_wrong_kind("callback", callback, wanted_by_name("callback", false));
  arguments.read_options(options, {"max_new_tokens", "cache", "model_cache", "stop_tokens", "callback"});
  arguments.finish(kModelCacheWords);
  // Each step takes the GIL once: for Ctrl-C, and for the callback, which goes on unless it returns False.
  options.callback([&callback](const at::Tensor& tokens) {
    py::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return callback.is_none() || !callback(tokens).is(py::bool_(false));
  });
  return without_gil([&] { return generate(self, ids, options); });
}

}  // namespace

void register_causal_lm(py::module_& m) {
  py::class_<Sampler>(m, "Sampler", "Chooses a token from each row of logits [B, V]: the likeliest, or drawn.")
      .def(py::init([](std::optional<double> temperature, std::optional<int64_t> top_k, std::optional<double> top_p,
                       std::optional<uint64_t> seed) {
             return Sampler(temperature, top_k, top_p, seed, at::Device("cpu"));
           }),
           py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("seed"))
      .def("__call__", [](Sampler& self, const at::Tensor& logits) {
        return without_gil([&] {
          const at::NoGradGuard no_grad;
          return self(logits);
        });
      });
  auto cls = bind_module<CausalLMImpl>(m, "CausalLM", "A decoder-only language model with Llama's layers and names.");
  bind_options<CausalLMImpl, CausalLMOptions, int64_t, int64_t, int64_t, int64_t>(cls, 5);
  bind_method(cls, "resolved_layers", {}, 0, [](const CausalLMImpl& self, Arguments& arguments) {
    arguments.finish();
    return to_python(self.resolved_layers());
  });
  bind_method(cls, "forward", {"ids", "cache", "mask", "positions", "lengths"}, 2,
              [](CausalLMImpl& self, Arguments& arguments) {
                const auto ids = arguments.require<at::Tensor>("ids");
                CausalLMInputs inputs;
                arguments.read_options(inputs);
                arguments.finish(kModelCacheWords);
                return without_gil([&] { return self.forward(ids, inputs); });
              });
  bind_method(cls, "generate",
              {"ids", "max_new_tokens", "cache", "num_return_sequences", "lengths", "stop_tokens", "temperature",
               "top_k", "top_p", "seed", "callback"},
              1, &generate_py);
}

}  // namespace attnpack
