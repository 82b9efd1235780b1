#include <attnpack/convert/detail/latent.h>
#include <attnpack/convert/fused.h>
#include <attnpack/convert/models.h>
#include <attnpack/convert/modules.h>
#include <attnpack/convert/pool.h>
#include <attnpack/convert/similar.h>
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

// to_gqa and to_mqa of one kind of C++ module.
template <typename Holder>
void bind_modules(py::module_& m) {
  using Impl = typename Holder::ContainedType;
  m.def(
      "to_gqa",
      [](const std::shared_ptr<Impl>& module, int64_t num_kv_heads, const std::string& method, int64_t window,
         const OptionalGroups& groups, const Seed& seed, const Rows& calibration) {
        return convert::to_gqa(Holder(module), num_kv_heads, gqa_options(method, window, groups, seed, calibration))
            .ptr();
      },
      py::arg("module"), py::arg("num_kv_heads"), py::arg("method"), py::arg("window"), py::arg("groups"),
      py::arg("seed"), py::arg("calibration"));
  m.def(
      "to_mqa",
      [](const std::shared_ptr<Impl>& module, const std::string& method, int64_t window, const OptionalGroups& groups,
         const Seed& seed, const Rows& calibration) {
        return convert::to_mqa(Holder(module), gqa_options(method, window, groups, seed, calibration)).ptr();
      },
      py::arg("module"), py::arg("method"), py::arg("window"), py::arg("groups"), py::arg("seed"),
      py::arg("calibration"));
}

template <typename Holder>
void bind_to_mla(py::module_& m) {
  m.def(
      "to_mla",
      [](const std::shared_ptr<typename Holder::ContainedType>& module, int64_t kv_lora_rank, const Rows& calibration,
         int64_t length) {
        const auto options = convert::ToMlaOptions().calibration(to_calibration(calibration)).length(length);
        return convert::to_mla(Holder(module), kv_lora_rank, options).ptr();
      },
      py::arg("module"), py::arg("kv_lora_rank"), py::arg("calibration"), py::arg("length"));
}

}  // namespace

void register_convert(py::module_& m) {
  m.def(
      "pool_kv_heads",
      [](const at::Tensor& weight, int64_t num_heads, int64_t num_kv_heads, const std::string& method, int64_t window,
         const OptionalGroups& groups, const Seed& seed) {
        return convert::pool_kv_heads(weight, num_heads, num_kv_heads,
                                      convert::PoolOptions().method(method).window(window).groups(groups).seed(seed));
      },
      py::arg("weight"), py::arg("num_heads"), py::arg("num_kv_heads"), py::kw_only(), py::arg("method") = "mean",
      py::arg("window") = 1, py::arg("groups") = py::none(), py::arg("seed") = py::none());
  m.def("split_qkv", &convert::split_qkv, py::arg("weight"), py::arg("layout"), py::arg("num_heads"),
        py::arg("num_kv_heads"));
  m.def("fuse_qkv", &convert::fuse_qkv, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("layout"),
        py::arg("num_heads"), py::arg("num_kv_heads"));
  m.def("choose_groups", &convert::choose_groups, py::arg("distances"), py::arg("num_kv_heads"), py::arg("uneven"));
  m.def(
      "head_distances",
      [](const std::vector<OptionalTensor>& weights, int64_t num_kv_heads, const Rows& calibration) {
        return convert::head_distances(to_weights(weights), num_kv_heads, to_calibration(calibration));
      },
      py::arg("weights"), py::arg("num_kv_heads"), py::arg("calibration"));
  m.def(
      "merge_kv_heads",
      [](const std::vector<OptionalTensor>& weights, int64_t num_heads, int64_t num_kv_heads, int64_t new_kv_heads,
         const std::optional<std::vector<int64_t>>& head_map, const std::string& method, int64_t window,
         const OptionalGroups& groups, const Seed& seed, const Rows& calibration, int64_t rope_dim, bool interleaved,
         bool key_norm, bool reorder) {
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
      },
      py::arg("weights"), py::kw_only(), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("new_kv_heads"),
      py::arg("head_map"), py::arg("method"), py::arg("window"), py::arg("groups"), py::arg("seed"),
      py::arg("calibration"), py::arg("rope_dim"), py::arg("interleaved"), py::arg("key_norm"), py::arg("reorder"));
  m.def(
      "factorise_latent",
      [](const std::vector<OptionalTensor>& weights, int64_t num_heads, int64_t num_kv_heads, int64_t kv_lora_rank,
         const std::optional<std::vector<int64_t>>& head_map, const std::vector<double>& inv_freq, bool interleaved,
         double rope_factor, int64_t length, bool causal, const Rows& calibration) {
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
      },
      py::arg("weights"), py::kw_only(), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("kv_lora_rank"),
      py::arg("head_map"), py::arg("inv_freq"), py::arg("interleaved"), py::arg("rope_factor"), py::arg("length"),
      py::arg("causal"), py::arg("calibration"));
  const auto model_arguments = [&](const auto& bind) {
    bind(py::arg("model"), py::arg("num_kv_heads"), py::arg("method"), py::arg("window"), py::arg("groups"),
         py::arg("seed"), py::arg("encoder"));
  };
  model_arguments([&](const auto&... arguments) {
    m.def(
        "model_to_gqa",
        [](const std::shared_ptr<CausalLMImpl>& model, int64_t num_kv_heads, const std::string& method, int64_t window,
           const OptionalGroups& groups, const Seed& seed, bool) {
          return convert::to_gqa(CausalLM(model), num_kv_heads, gqa_options(method, window, groups, seed, {})).ptr();
        },
        arguments...);
    m.def(
        "model_to_gqa",
        [](const std::shared_ptr<EncoderDecoderImpl>& model, int64_t num_kv_heads, const std::string& method,
           int64_t window, const OptionalGroups& groups, const Seed& seed, bool encoder) {
          return convert::to_gqa(EncoderDecoder(model), num_kv_heads, gqa_options(method, window, groups, seed, {}),
                                 encoder)
              .ptr();
        },
        arguments...);
  });
  bind_to_mla<MultiHeadAttention>(m);
  bind_to_mla<GroupedQueryAttention>(m);
  bind_to_mla<MultiQueryAttention>(m);
  bind_modules<MultiHeadAttention>(m);
  bind_modules<GroupedQueryAttention>(m);
  bind_modules<MultiQueryAttention>(m);
}

}  // namespace attnpack
