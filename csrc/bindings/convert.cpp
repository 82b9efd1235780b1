#include <attnpack/convert/detail/latent.h>
#include <attnpack/convert/detail/model_checks.h>
#include <attnpack/convert/fused.h>
#include <attnpack/convert/latent_conversion.h>
#include <attnpack/convert/models.h>
#include <attnpack/convert/modules.h>
#include <attnpack/convert/pool.h>
#include <attnpack/convert/similar.h>
#include <bindings/causal_lm_options.h>
#include <bindings/common.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

using convert::AttentionWeights;
using convert::Calibration;
using OptionalGroups = std::optional<convert::Groups>;
using Seed = std::optional<uint64_t>;
using Rows = std::vector<OptionalTensor>;  // calibration: x, context, value_context, or the first ones of these

at::Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

OptionalTensor or_none(const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

Calibration to_calibration(const Rows& rows) {
  const auto row = [&](size_t i) { return i < rows.size() ? or_undefined(rows[i]) : at::Tensor(); };
  return {row(0), row(1), row(2)};
}

// q, k, v, o, q_bias, k_bias, v_bias
AttentionWeights to_weights(const std::vector<OptionalTensor>& w) {
  return {or_undefined(w.at(0)), or_undefined(w.at(1)), or_undefined(w.at(2)), or_undefined(w.at(3)),
          or_undefined(w.at(4)), or_undefined(w.at(5)), or_undefined(w.at(6))};
}

std::vector<OptionalTensor> from_weights(const AttentionWeights& w) {
  return {w.q, w.k, w.v, w.o, or_none(w.q_bias), or_none(w.k_bias), or_none(w.v_bias)};
}

convert::ToGqaOptions gqa_options(const std::string& method, int64_t window, const OptionalGroups& groups,
                                  const Seed& seed, const Rows& calibration) {
  return convert::ToGqaOptions().method(method).window(window).groups(groups).seed(seed).calibration(
      to_calibration(calibration));
}

// call(holder) for an attention layer of one of the three kinds.
template <typename Call>
py::object with_layer(const py::object& module, const Call& call) {
  const auto holds = [&](auto* impl) { return py::isinstance<std::remove_pointer_t<decltype(impl)>>(module); };
  const auto run = [&](auto holder) { return py::cast(call(holder).ptr()); };
  if (holds((MultiHeadAttentionImpl*)nullptr))
    return run(MultiHeadAttention(module.cast<std::shared_ptr<MultiHeadAttentionImpl>>()));
  if (holds((GroupedQueryAttentionImpl*)nullptr))
    return run(GroupedQueryAttention(module.cast<std::shared_ptr<GroupedQueryAttentionImpl>>()));
  if (holds((MultiQueryAttentionImpl*)nullptr))
    return run(MultiQueryAttention(module.cast<std::shared_ptr<MultiQueryAttentionImpl>>()));
  raise_wrong_kind("module", module, "a MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention");
}

py::object to_gqa_py(const py::object& module, int64_t num_kv_heads, const std::string& method, int64_t window,
                     const OptionalGroups& groups, const Seed& seed, const Rows& calibration) {
  const auto options = gqa_options(method, window, groups, seed, calibration);
  return with_layer(module, [&](const auto& layer) { return convert::to_gqa(layer, num_kv_heads, options); });
}

py::object to_mqa_py(const py::object& module, const std::string& method, int64_t window, const OptionalGroups& groups,
                     const Seed& seed, const Rows& calibration) {
  const auto options = gqa_options(method, window, groups, seed, calibration);
  return with_layer(module, [&](const auto& layer) { return convert::to_mqa(layer, options); });
}

py::object to_mla_py(const py::object& module, int64_t kv_lora_rank, const Rows& calibration, int64_t length,
                     const std::optional<int64_t>& rope_dim) {
  const auto options =
      convert::ToMlaOptions().calibration(to_calibration(calibration)).length(length).rope_dim(rope_dim);
  return with_layer(module, [&](const auto& layer) { return convert::to_mla(layer, kv_lora_rank, options); });
}

py::object model_to_gqa_py(const py::object& model, int64_t num_kv_heads, const std::string& method, int64_t window,
                           const OptionalGroups& groups, const Seed& seed, bool encoder) {
  const auto options = gqa_options(method, window, groups, seed, {});
  if (py::isinstance<CausalLMImpl>(model)) {
    const CausalLM holder(model.cast<std::shared_ptr<CausalLMImpl>>());
    return py::cast(convert::to_gqa(holder, num_kv_heads, options).ptr());
  }
  const EncoderDecoder holder(model.cast<std::shared_ptr<EncoderDecoderImpl>>());
  return py::cast(convert::to_gqa(holder, num_kv_heads, options, encoder).ptr());
}

py::object model_to_mla_py(const py::object& model, int64_t kv_lora_rank, const std::optional<int64_t>& rope_dim,
                           const OptionalTensor& ids, int64_t length) {
  const CausalLM holder(model.cast<std::shared_ptr<CausalLMImpl>>());
  const auto options = convert::ToMlaOptions().rope_dim(rope_dim).ids(or_undefined(ids)).length(length);
  return py::cast(without_gil([&] { return convert::to_mla(holder, kv_lora_rank, options).ptr(); }));
}

// config: keywords of CausalLM.
void bind_latent_conversion(py::module_& m) {
  using convert::LatentConversion;
  py::class_<LatentConversion>(m, "LatentConversion")
      .def(py::init(
          [](int64_t kv_lora_rank, const std::optional<int64_t>& rope_dim, int64_t length, const py::kwargs& config) {
            return LatentConversion(model_options(config), kv_lora_rank, rope_dim, length);
          }))
      .def_property_readonly("learns", &LatentConversion::learns)
      .def("learn",
           [](LatentConversion& self, const StateDict& tensors, const OptionalTensor& calibration) {
             without_gil([&] { self.learn(tensors, or_undefined(calibration)); });
           })
      .def("convert",
           [](LatentConversion& self, const StateDict& tensors, const OptionalTensor& calibration) {
             return without_gil([&] { return self.convert(tensors, or_undefined(calibration)); });
           })
      .def("config", [](LatentConversion& self) { return options_dict(self.options()); });
  m.def("with_multipliers", [](const std::string& name, const at::Tensor& tensor, const py::kwargs& config) {
    return convert::with_multipliers(model_options(config), name, tensor);
  });
}

at::Tensor pool_kv_heads_py(const at::Tensor& weight, int64_t num_heads, int64_t num_kv_heads,
                            const std::string& method, int64_t window, const OptionalGroups& groups, const Seed& seed) {
  return convert::pool_kv_heads(weight, num_heads, num_kv_heads,
                                convert::PoolOptions().method(method).window(window).groups(groups).seed(seed));
}

py::object merge_kv_heads_py(const std::vector<OptionalTensor>& weights, int64_t num_heads, int64_t num_kv_heads,
                             int64_t new_kv_heads, const std::optional<std::vector<int64_t>>& head_map,
                             const std::string& method, int64_t window, const OptionalGroups& groups, const Seed& seed,
                             const Rows& calibration, int64_t rope_dim, bool interleaved, bool key_norm, bool reorder) {
  auto merged =
      convert::merge_kv_heads(to_weights(weights), convert::MergeOptions(num_heads, num_kv_heads, new_kv_heads)
                                                       .head_map(head_map)
                                                       .method(method)
                                                       .window(window)
                                                       .groups(groups)
                                                       .seed(seed)
                                                       .calibration(to_calibration(calibration))
                                                       .rope_dim(rope_dim)
                                                       .interleaved(interleaved)
                                                       .key_norm(key_norm)
                                                       .reorder(reorder));
  return py::make_tuple(from_weights(merged.weights), merged.head_map, merged.head_order, merged.groups);
}

// The latent form of weights by themselves, whose errors the tests measure.
py::object factorise_latent_py(const std::vector<OptionalTensor>& weights, int64_t num_heads, int64_t num_kv_heads,
                               int64_t kv_lora_rank, const std::optional<std::vector<int64_t>>& head_map,
                               const std::vector<double>& inv_freq, bool interleaved, double rope_factor,
                               int64_t length, bool causal, const Rows& calibration) {
  const auto made =
      convert::factorise_latent(to_weights(weights), convert::LatentOptions(num_heads, num_kv_heads, kv_lora_rank)
                                                         .head_map(head_map)
                                                         .inv_freq(inv_freq)
                                                         .interleaved(interleaved)
                                                         .rope_factor(rope_factor)
                                                         .length(length)
                                                         .causal(causal)
                                                         .calibration(to_calibration(calibration)));
  return py::make_tuple(made.q, or_none(made.q_bias), made.kv_a, or_none(made.kv_a_bias), made.kv_b);
}

}  // namespace

void register_convert(py::module_& m) {
  define_by_name(m, "pool_kv_heads", &pool_kv_heads_py,
                 {"weight", "num_heads", "num_kv_heads", "method", "window", "groups", "seed"});
  define_by_name(m, "merge_kv_heads", &merge_kv_heads_py,
                 {"weights", "num_heads", "num_kv_heads", "new_kv_heads", "head_map", "method", "window", "groups",
                  "seed", "calibration", "rope_dim", "interleaved", "key_norm", "reorder"});
  define_by_name(m, "split_qkv", &convert::split_qkv, {"weight", "layout", "num_heads", "num_kv_heads"});
  define_by_name(m, "fuse_qkv", &convert::fuse_qkv, {"q", "k", "v", "layout", "num_heads", "num_kv_heads"});
  define_by_name(m, "to_gqa", &to_gqa_py,
                 {"module", "num_kv_heads", "method", "window", "groups", "seed", "calibration"});
  define_by_name(m, "to_mqa", &to_mqa_py, {"module", "method", "window", "groups", "seed", "calibration"});
  define_by_name(m, "to_mla", &to_mla_py, {"module", "kv_lora_rank", "calibration", "length", "rope_dim"});
  define_by_name(m, "factorise_latent", &factorise_latent_py,
                 {"weights", "num_heads", "num_kv_heads", "kv_lora_rank", "head_map", "inv_freq", "interleaved",
                  "rope_factor", "length", "causal", "calibration"});
  define_by_name(m, "model_to_gqa", &model_to_gqa_py,
                 {"model", "num_kv_heads", "method", "window", "groups", "seed", "encoder"});
  define_by_name(m, "model_to_mla", &model_to_mla_py, {"model", "kv_lora_rank", "rope_dim", "ids", "length"});
  bind_latent_conversion(m);
  m.def("refuse_calibration", &convert::refuse_calibration);
  m.def("check_layers_found", &convert::check_layers_found);
  m.def("choose_groups", &convert::choose_groups, py::arg("distances"), py::arg("num_kv_heads"), py::arg("uneven"));
  m.def(
      "head_distances",
      [](const std::vector<OptionalTensor>& weights, int64_t num_kv_heads, const Rows& calibration) {
        return convert::head_distances(to_weights(weights), num_kv_heads, to_calibration(calibration));
      },
      py::arg("weights"), py::arg("num_kv_heads"), py::arg("calibration"));
}

}  // namespace attnpack
