#include <attnpack/models/detail/generate_steps.h>
#include <bindings/causal_lm_options.h>
#include <bindings/generate.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

at::Tensor generate_causal_lm_py(CausalLMImpl& self, Arguments& arguments) {
  const auto ids = arguments.require<at::Tensor>("ids");
  return run_generate(arguments, [&](const GenerateOptions& options) { return generate(self, ids, options); });
}

// The loop of generate over a model of Python, whose steps are the given functions.
py::object generate_by_py(Arguments& arguments) {
  const auto states = arguments.require<py::object>("states"), head = arguments.require<py::object>("head"),
             pick_rows = arguments.require<py::object>("pick_rows"), agreed = arguments.require<py::object>("agreed");
  const auto ids = arguments.require<at::Tensor>("ids");
  const auto call = [](const char* result, const py::object& function, const auto&... given) {
    const py::gil_scoped_acquire acquired;
    return read_value<at::Tensor>(result, function(given...), result);
  };
  const GenerateSteps steps{
      .states = [&](const auto& new_ids,
                    const auto& lengths) { return call("what states returns", states, new_ids, lengths); },
      .head = [&](const at::Tensor& state) { return call("what head returns", head, state); },
      .pick_rows =
          [&](const at::Tensor& index) {
            const py::gil_scoped_acquire acquired;
            pick_rows(index);
          },
      .agreed = [&](const at::Tensor& tokens) { return call("what agreed returns", agreed, tokens); }};
  return py::cast(
      run_generate(arguments, [&](const GenerateOptions& options) { return generate(steps, ids, options); }));
}

}  // namespace

void register_causal_lm(py::module_& m) {
  add_named_function(m, "generate_by", names_of_generate({"states", "head", "pick_rows", "agreed", "ids"}),
                     &generate_by_py);
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
