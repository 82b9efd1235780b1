#include <bindings/register.h>

// Without a GIL, importing this module does not bring it back: nothing here needs it.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m, py::mod_gil_not_used()) {
  m.doc() = "The native side of attnpack.";
  attnpack::register_ops(m);
  auto checks = m.def_submodule("checks", "The checks of calls.");
  attnpack::register_checks(checks);
  auto cpp = m.def_submodule("cpp", "attnpack's C++ modules and caches, bound as they are.");
  attnpack::register_caches(cpp);
  attnpack::register_layers(cpp);
  attnpack::register_attention(cpp);
  attnpack::register_recurrent(cpp);
  attnpack::register_blocks(cpp);
  attnpack::register_causal_lm(cpp);
  auto convert = m.def_submodule("convert", "Weights of one variant as those of another.");
  attnpack::register_convert(convert);
  auto linear_layers = m.def_submodule("linear_layers", "Calls of torch's linear layers.");
  attnpack::register_plain_linear(linear_layers);
  auto backend = m.def_submodule("backend", "Functions of torch that run on the operator.");
  attnpack::register_backend(backend);
  auto checkpoints = m.def_submodule("checkpoints", "Files of weights, JSON, and Hugging Face directories.");
  attnpack::register_checkpoints(checkpoints);
  auto context_parallel =
      m.def_submodule("context_parallel", "Python's context_parallel, as the modules of C++ see it.");
  attnpack::register_context_parallel(context_parallel);
#ifdef ATTNPACK_DISTRIBUTED
  auto distributed = m.def_submodule("distributed", "Attention by several processes.");
  attnpack::register_distributed(distributed);
#endif
}
