#include <attnpack/core/padded.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/recurrent.h>
#include <attnpack/rope/rotate.h>
#include <bindings/common.h>
#include <bindings/plain_linear.h>
#include <bindings/register.h>

// The checks of calls, for the Python modules: both languages raise the same sentences.
namespace attnpack {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
constexpr const char* kMakeTensor = ": torch.tensor() makes one of a list";

// The tensor in value; `wanted` gives the words for the right kind, which only an error needs.
template <typename Wanted>
at::Tensor as_tensor(const char* name, const py::object& value, const Wanted& wanted) {
  if (!THPVariable_Check(value.ptr())) raise_wrong_kind(name, value, wanted());
  auto tensor = THPVariable_Unpack(value.ptr());
  check_padded(name, tensor);
  return tensor;
}

OptionalTensor as_optional_tensor(const char* name, const py::object& value) {
  return read_value<OptionalTensor>(name, value, name);
}

std::string wanted_input(int64_t width) { return text_of({"a tensor [batch, length, ", width, "]", kMakeTensor}); }

// The weight whose dtype and device an input must have. A module in place of the plain linear may want others.
at::Tensor weight_of(const py::object& projection) { return linear_weight(projection).value_or(at::Tensor()); }

void check_input_py(const std::string& name, const py::object& tensor, int64_t width, const py::object& projection) {
  check_input(name.c_str(), as_tensor(name.c_str(), tensor, [&] { return wanted_input(width); }), width,
              weight_of(projection));
}

void check_tokens_py(const std::string& name, const py::object& tensor, int64_t width, const py::object& projection) {
  const auto wanted = [&] { return text_of({"a tensor [..., ", width, "]", kMakeTensor}); };
  check_tokens(name.c_str(), as_tensor(name.c_str(), tensor, wanted), width, weight_of(projection));
}

void check_inputs_py(const py::object& x, const OptionalTensor& context, const OptionalTensor& value_context,
                     bool cache, int64_t q_width, const py::object& q_proj, int64_t k_width, const py::object& k_proj,
                     int64_t v_width, const py::object& v_proj) {
  check_inputs(as_tensor("x", x, [&] { return wanted_input(q_width); }), context, value_context, cache,
               {q_width, weight_of(q_proj)}, {k_width, weight_of(k_proj)}, {v_width, weight_of(v_proj)});
}

void check_size_py(const std::string& name, const py::object& size) {
  check_size(name.c_str(), read_value<int64_t>(name, size, name));
}

void check_dropout_py(const std::string& name, const py::object& dropout) {
  check_dropout(name.c_str(), read_value<double>(name, dropout, name));
}

}  // namespace

void register_checks(py::module_& m) {
  m.def("padded", &check_padded);
  define(m, "input", &check_input_py, {"name", "tensor", "width", "projection"});
  define(m, "tokens", &check_tokens_py, {"name", "tensor", "width", "projection"});
  define(m, "inputs", &check_inputs_py,
         {"x", "context", "value_context", "cache", "q_width", "q_proj", "k_width", "k_proj", "v_width", "v_proj"});
  m.def("one_latent", &check_one_latent);
  m.def("keys_are_values", &check_keys_are_values);
  m.def("kv_from", &check_kv_from);
  m.def("own_keys", &check_own_keys);
  m.def("chunked_call", &check_chunked_call);
  m.def("kv_source", &check_kv_source);
  m.def("layer_input", &check_layer_input);
  m.def("no_kv_from", &check_no_kv_from);
  m.def("keys_and_values", &check_keys_and_values);
  m.def("positions", [](const py::object& positions, int64_t batch, int64_t length) {
    check_positions(as_optional_tensor("positions", positions), batch, length);
  });
  m.def("refuse_under", [](const std::string& place, const std::string& what, const std::string& fix) {
    refuse_under(place.c_str(), what.c_str(), fix.c_str());
  });
  m.def("part_positions", [](const py::object& positions, int64_t length) {
    check_part_positions(as_optional_tensor("positions", positions), length);
  });
  m.def("single_process_inputs", [](bool mask, bool need_weights, bool cache, bool cross, double dropout,
                                    bool rope_by_length, const std::string& place) {
    refuse_single_process_inputs({mask, need_weights, cache, cross, dropout, rope_by_length}, place.c_str());
  });
  m.def("named_keys_over_ranks", &refuse_named_keys);
  m.def("lengths", [](const char* name, const py::object& lengths, const py::object& x) {
    if (!THPVariable_Check(x.ptr())) return;  // such an x is refused where it is read
    check_lengths(name, as_optional_tensor(name, lengths), THPVariable_Unpack(x.ptr()));
  });
  m.def("ids", [](const char* name, const py::object& ids, const OptionalTensor& weight) {
    const auto tensor = as_tensor(name, ids, [] { return wanted_by_name("ids", false); });
    check_ids(name, tensor);
    if (weight) check_device(name, tensor, *weight);
  });
  m.def("vocabulary", &check_vocabulary);
  m.def("states", &check_states);
  m.def("output_width", &check_output_width);
  m.def("part_width", &check_part_width);
  m.def("layer_width", &check_layer_width);
  m.def("embedding_width", &check_embedding_width);
  m.def("learned_positions", &check_learned_positions);
  m.def("layout", &check_layout);
  m.def("activation", &check_activation);
  m.def("cross_attention", &check_cross_attention);
  m.def("cross_cache", &check_cross_cache);
  m.def("recurrent_call", &check_recurrent_call);
  m.def("self_cache", &check_self_cache);
  m.def("cross_distances", &check_cross_distances);
  m.def("projected_cache", &check_projected_cache);
  m.def("cache_layers", &check_cache_layers);
  define(m, "layers_given", &check_layers_given, {"layers"});
  define(m, "norm_kind", &check_norm_kind, {"norm"});
  define(m, "dropout", &check_dropout_py, {"name", "dropout"});
  define(m, "size", &check_size_py, {"name", "size"});
  m.def("device", [](const py::object& device) { make_factory(device, py::none()); });
  m.def("dtype", [](const py::object& dtype) { make_factory(py::str("meta"), dtype); });
  m.def("unexpected_keyword", &raise_unexpected_keyword);
  m.def("wrong_kind", &wrong_kind);
  m.def("with_article", &with_article);
}

}  // namespace attnpack
