#pragma once

#include <bindings/torch_pybind.h>

namespace attnpack {

// One function per topic, defined in the file of that name.
void register_ops(py::module_& m);
void register_checks(py::module_& m);
void register_caches(py::module_& m);
void register_layers(py::module_& m);
void register_attention(py::module_& m);
void register_recurrent(py::module_& m);
void register_blocks(py::module_& m);
void register_causal_lm(py::module_& m);
void register_convert(py::module_& m);
void register_plain_linear(py::module_& m);
void register_backend(py::module_& m);
void register_checkpoints(py::module_& m);
void register_gguf(py::module_& m);
void register_gguf_model(py::module_& m);
void register_context_parallel(py::module_& m);
void register_distributed(py::module_& m);

}  // namespace attnpack
