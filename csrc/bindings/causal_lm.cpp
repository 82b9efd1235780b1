#include <attnpack/models/detail/sampler.h>
#include <bindings/causal_lm_options.h>
#include <bindings/generate.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

at::Tensor generate_causal_lm_py(CausalLMImpl& self, Arguments& arguments) {
  const auto ids = arguments.require<at::Tensor>("ids");
  return run_generate(arguments, [&](const GenerateOptions& options) { return generate(self, ids, options); });
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
                arguments.finish(kModelCacheDescription);
                return without_gil([&] { return self.forward(ids, inputs); });
              });
  bind_method(cls, "generate", names_of_generate({"ids"}), 1, &generate_causal_lm_py);
}

}  // namespace attnpack
