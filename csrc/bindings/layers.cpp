#include <attnpack/modules/embedding.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>
#include <bindings/common.h>
#include <bindings/register.h>
#include <bindings/rope_scaling.h>

namespace attnpack {

void register_layers(py::module_& m) {
  const auto released = py::call_guard<py::gil_scoped_release>();

  bind_module<LinearImpl>(m, "Linear", "x W^T + b.")
      .def(
          py::init([](int64_t in_features, int64_t out_features, bool bias, const py::object& device,
                      const py::object& dtype) {
            return LinearImpl(LinearOptions(in_features, out_features).bias(bias).factory(make_factory(device, dtype)));
          }),
          py::arg("in_features"), py::arg("out_features"), py::kw_only(), py::arg("bias") = false,
          py::arg("device") = py::none(), py::arg("dtype") = py::none())
      .def("forward", &LinearImpl::forward, py::arg("x"), released);

  bind_module<EmbeddingImpl>(m, "Embedding", "Rows of a table by token id.")
      .def(py::init([](int64_t vocab_size, int64_t embed_dim, const py::object& device, const py::object& dtype) {
             return EmbeddingImpl(EmbeddingOptions(vocab_size, embed_dim).factory(make_factory(device, dtype)));
           }),
           py::arg("vocab_size"), py::arg("embed_dim"), py::kw_only(), py::arg("device") = py::none(),
           py::arg("dtype") = py::none())
      .def("forward", &EmbeddingImpl::forward, py::arg("ids"), released);

  bind_module<RMSNormImpl>(m, "RMSNorm", "x / sqrt(mean(x^2) + eps) * weight.")
      .def(py::init([](int64_t dim, double eps, const py::object& device, const py::object& dtype) {
             return RMSNormImpl(RMSNormOptions(dim).eps(eps).factory(make_factory(device, dtype)));
           }),
           py::arg("dim"), py::kw_only(), py::arg("eps") = 1e-6, py::arg("device") = py::none(),
           py::arg("dtype") = py::none())
      .def("forward", &RMSNormImpl::forward, py::arg("x"), released);

  bind_module<FeedForwardImpl>(m, "FeedForward", "down(silu(gate(x)) * up(x)), or down(gelu(up(x))).")
      .def(py::init([](int64_t embed_dim, int64_t hidden_dim, const std::string& activation, bool bias,
                       const py::object& device, const py::object& dtype) {
             return FeedForwardImpl(FeedForwardOptions(embed_dim, hidden_dim)
                                        .activation(activation)
                                        .bias(bias)
                                        .factory(make_factory(device, dtype)));
           }),
           py::arg("embed_dim"), py::arg("hidden_dim"), py::kw_only(), py::arg("activation") = "swiglu",
           py::arg("bias") = false, py::arg("device") = py::none(), py::arg("dtype") = py::none())
      .def("forward", &FeedForwardImpl::forward, py::arg("x"), released);

  bind_module<RotaryEmbeddingImpl>(m, "RotaryEmbedding", "Rotary position embedding; no parameters.")
      .def(py::init([](int64_t dim, double base, int64_t max_positions, const py::object& scaling, bool interleaved,
                       std::optional<bool> raw_keys, const py::object&, const py::object&) {
             return RotaryEmbeddingImpl(RotaryEmbeddingOptions(dim)
                                            .base(base)
                                            .max_positions(max_positions)
                                            .scaling(parse_scaling(scaling))
                                            .interleaved(interleaved)
                                            .raw_keys(raw_keys));
           }),
           py::arg("dim"), py::kw_only(), py::arg("base") = 10000.0, py::arg("max_positions") = 2048,
           py::arg("scaling") = py::none(), py::arg("interleaved") = false, py::arg("raw_keys") = py::none(),
           py::arg("device") = py::none(), py::arg("dtype") = py::none())
      .def_property_readonly("inv_freq", [](RotaryEmbeddingImpl& self) { return self.settings.inv_freq; })
      .def_property_readonly("factor", [](RotaryEmbeddingImpl& self) { return self.settings.factor; })
      .def_property_readonly("long_inv_freq", [](RotaryEmbeddingImpl& self) { return self.settings.long_inv_freq; })
      .def_property_readonly("growth", [](RotaryEmbeddingImpl& self) { return self.settings.growth; })
      .def_property_readonly("trained_len", [](RotaryEmbeddingImpl& self) { return self.settings.trained_len; })
      .def_property_readonly("raw_keys", [](RotaryEmbeddingImpl& self) { return self.settings.raw_keys; })
      .def_property_readonly("softmax_factor", [](RotaryEmbeddingImpl& self) { return self.settings.softmax_factor; })
      .def("forward", &RotaryEmbeddingImpl::forward, py::arg("x"), py::arg("positions") = py::none(), released);
}

}  // namespace attnpack
