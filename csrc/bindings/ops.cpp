#include <bindings/common.h>
#include <bindings/fast_path.h>
#include <bindings/keyword_call.h>
#include <bindings/operator_settings.h>

#include <attnpack/core/stored.h>
#include <attnpack/layers/alibi.h>
#include <attnpack/layers/attend.h>
#include <attnpack/layers/differential.h>
#include <attnpack/layers/gate_heads.h>
#include <attnpack/layers/latent_attend.h>
#include <attnpack/layers/select_keys.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/attention_varlen.h>
#include <attnpack/ops/causal_conv1d.h>
#include <attnpack/ops/cpu/machine_speed.h>
#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/detail/onednn_linear.h>
#include <attnpack/ops/library.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/linear_attention.h>
#include <attnpack/ops/merge_states.h>
#include <attnpack/ops/null.h>
#include <attnpack/ops/quantize.h>
#include <attnpack/ops/rms_norm.h>
#include <attnpack/ops/rope.h>
#include <attnpack/ops/score_rules.h>
#include <attnpack/ops/stored_linear.h>
#include <attnpack/ops/swiglu.h>
#include <attnpack/rope/sinusoidal.h>
#include <bindings/rope_scaling.h>

// The operators for eager Python. Python calls them through here and not through torch.ops, because a call costs less
// this way (PERFORMANCE.md).
namespace attnpack {

template <>
struct Reader<std::optional<std::tuple<at::Tensor, at::Tensor>>> {
  using Tensors = std::optional<std::tuple<at::Tensor, at::Tensor>>;
  static std::optional<Tensors> read(const py::handle& value) {
    py::detail::make_caster<Tensors> caster;
    return caster.load(value, true) ? std::make_optional(py::detail::cast_op<Tensors>(std::move(caster)))
                                    : std::nullopt;
  }
  static std::string wanted(const std::string&) { return "the tensors (latents, lengths), or None"; }
};

// The fields of Python's CacheTensors, by name.
template <>
struct Reader<CacheTensors> {
  static std::optional<CacheTensors> read(const py::handle& value) {
    static const InternedNames names([](const auto& visit) { CacheTensors::for_each_member(CacheTensors(), visit); });
    PyObject* const given = value.ptr();
    CacheTensors cache;
    bool fits = true;
    size_t i = 0;
    CacheTensors::for_each_member(cache, [&]<class T>(const char*, T& member) {
      const auto field = py::reinterpret_steal<py::object>(PyObject_GetAttr(given, names[i++]));
      if (!field) PyErr_Clear();
      auto read = field ? Reader<T>::read(field) : std::nullopt;
      fits = fits && read;
      if (read) member = std::move(*read);
    });
    return fits ? std::make_optional(std::move(cache)) : std::nullopt;
  }
  static std::string wanted(const std::string& name) { return wanted_by_name(name, /*or_none=*/true); }
};

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

py::object attention_py(const GivenArguments& given) {
  Tensor query, key, value;
  OperatorSettings settings;
  bool return_lse = false;
  given.read([&](const auto& visit) {
    visit("query", query);
    visit("key", key);
    visit("value", value);
    visit("mask", settings.mask);
    visit("return_lse", return_lse);
    settings.visit(visit);
  });
  return first_or_both(return_lse, [&] { return attention_with_lse(query, key, value, settings.options()); });
}

py::object attention_scores_py(const GivenArguments& given) {
  Tensor query, key;
  OperatorSettings settings;
  std::string stage = "probs";
  given.read([&](const auto& visit) {
    visit("query", query);
    visit("key", key);
    visit("mask", settings.mask);
    settings.visit(visit);
    visit("stage", stage);
  });
  return py::cast(without_gil([&] { return attention_scores(query, key, settings.options(), stage); }));
}

template <bool kPublic>
py::object attention_varlen_py(const GivenArguments& given) {
  Tensor query, key, value, cu_seqlens_q;
  OptionalTensor cu_seqlens_k, block_table, kv_lens;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  QOffset q_offset = End{};
  ScoreRules rules;
  bool return_lse = false;
  given.read([&](const auto& visit) {
    visit("query", query);
    visit("key", key);
    visit("value", value);
    visit("cu_seqlens_q", cu_seqlens_q);
    visit("cu_seqlens_k", cu_seqlens_k);
    visit("return_lse", return_lse);
    visit("max_seqlen_q", max_seqlen_q);
    visit("max_seqlen_k", max_seqlen_k);
    visit("block_table", block_table);
    visit("kv_lens", kv_lens);
    if constexpr (!kPublic) visit("q_offset", q_offset);
    visit_rules(visit, rules);
  });
  const VarlenOptions options = VarlenOptions()
                                    .rules(rules)
                                    .cu_seqlens_k(cu_seqlens_k)
                                    .max_seqlen_q(max_seqlen_q)
                                    .max_seqlen_k(max_seqlen_k)
                                    .block_table(block_table)
                                    .kv_lens(kv_lens)
                                    .q_offset(q_offset);
  return first_or_both(return_lse, [&] { return attention_varlen_with_lse(query, key, value, cu_seqlens_q, options); });
}

py::object merge_states_py(const GivenArguments& given) {
  Tensor out_a, lse_a, out_b, lse_b;
  given.read([&](const auto& visit) {
    visit("out_a", out_a);
    visit("lse_a", lse_a);
    visit("out_b", out_b);
    visit("lse_b", lse_b);
  });
  return py::cast(without_gil([&] { return merge_states(out_a, lse_a, out_b, lse_b); }));
}

py::object apply_rope_py(const GivenArguments& given) {
  Tensor x, cos, sin;
  bool interleaved = false;
  given.read([&](const auto& visit) {
    visit("x", x);
    visit("cos", cos);
    visit("sin", sin);
    visit("interleaved", interleaved);
  });
  return py::cast(without_gil([&] { return apply_rope(x, cos, sin, interleaved); }));
}

using LatentTensors = std::tuple<Tensor, Tensor>;

// The arguments of every layer's function beside its tensors and its cache.
template <class Visit>
void visit_inputs(const Visit& visit, const RopeSettings*& rope, LayerInputs& inputs) {
  visit("rope", rope);
  visit("positions", inputs.positions);
  visit("cross", inputs.cross);
  visit("mask", inputs.mask);
  visit("kv_lens", inputs.kv_lens);
}

LayerInputs to_inputs(const RopeSettings* rope, const OptionalTensor& positions, bool causal,
                      const OptionalTensor& kv_lens, const OptionalTensor& mask) {
  LayerInputs r;
  if (rope) r.rope = *rope;
  r.positions = positions;
  r.causal = causal;
  r.kv_lens = kv_lens;
  r.mask = mask;
  return r;
}

// at_names changes only the weights.
void check_weights(bool need_weights, bool at_names) {
  ATTNPACK_CHECK(need_weights || !at_names, "at_names: got True without need_weights, which asks for the ",
                 "probabilities that it means; set both, or leave it out");
}

py::object attend_py(const GivenArguments& given) {
  Tensor query, key, value;
  AttendOptions options;
  const RopeSettings* rope = nullptr;
  BlockOptions blocks{1, 0, 0, "mean"};
  bool need_weights = false, at_names = false;
  given.read([&](const auto& visit) {
    visit("query", query);
    visit("key", key);
    visit("value", value);
    visit("need_weights", need_weights);
    visit_inputs(visit, rope, options);
    visit("cache", options.cache);
    visit("key_index", options.key_index);
    visit("key_block", options.key_block);
    visit("top_blocks", blocks.top_blocks);
    visit("local_blocks", blocks.local_blocks);
    visit("scorer", blocks.scorer);
    visit_rules(visit, options);
    visit("at_names", at_names);
  });
  check_weights(need_weights, at_names);
  if (rope) options.rope = *rope;
  blocks.block = options.key_block;
  if (blocks.top_blocks != 0) options.blocks = blocks;
  if (need_weights)
    return py::cast(without_gil([&] { return attend_with_weights(query, key, value, options, at_names); }));
  return py::cast(without_gil([&] { return attend(query, key, value, options); }));
}

py::object attend_shared_py(const GivenArguments& given) {
  Tensor query;
  CacheTensors shared;
  AttendOptions options;
  const RopeSettings* rope = nullptr;
  bool need_weights = false;
  given.read([&](const auto& visit) {
    visit("query", query);
    visit("key", shared.key);
    visit("value", shared.value);
    visit("lengths", shared.lengths);
    visit("need_weights", need_weights);
    visit_inputs(visit, rope, options);
    visit("key_index", options.key_index);
    visit("key_block", options.key_block);
    visit_rules(visit, options);
  });
  if (rope) options.rope = *rope;
  options.cache = shared;
  if (need_weights) return py::cast(without_gil([&] { return attend_shared_with_weights(query, options); }));
  return py::cast(without_gil([&] { return attend_shared(query, options); }));
}

Tensor subtract_halves_py(const Tensor& joined, int64_t num_heads, const Tensor& q1, const Tensor& k1, const Tensor& q2,
                          const Tensor& k2, double lambda_init, double eps) {
  return subtract_halves(joined, num_heads, {q1, k1, q2, k2}, lambda_init, eps);
}

Tensor select_keys_py(const Tensor& query, const Tensor& key, const Tensor& weights, int64_t top_k, bool causal,
                      const OptionalTensor& q_offsets, const OptionalTensor& kv_lens, const OptionalTensor& mask,
                      int64_t local_keys) {
  return select_keys(query, key, weights, top_k, {causal, q_offsets, kv_lens, mask}, local_keys);
}

Tensor index_keys_py(const Tensor& query, const Tensor& key, const Tensor& weights, int64_t top_k, int64_t local_keys,
                     const std::optional<LatentTensors>& cache, const RopeSettings* rope,
                     const OptionalTensor& positions, bool causal, const OptionalTensor& kv_lens,
                     const OptionalTensor& mask) {
  auto inputs = to_inputs(rope, positions, causal, kv_lens, mask);
  if (cache) inputs.cache = CacheTensors{std::get<0>(*cache), Tensor(), std::get<1>(*cache)};
  return index_keys({query, key, weights}, top_k, local_keys, inputs);
}

Tensor indexer_loss_py(const Tensor& query, const Tensor& key, const Tensor& weights, const Tensor& probabilities,
                       const OptionalTensor& key_index, const RopeSettings* rope, const OptionalTensor& positions,
                       bool causal, const OptionalTensor& kv_lens, const OptionalTensor& mask, bool at_names) {
  return indexer_loss({query, key, weights}, probabilities, key_index,
                      to_inputs(rope, positions, causal, kv_lens, mask), at_names);
}

Tensor select_blocks_py(const Tensor& query, const Tensor& key, int64_t block, int64_t top_blocks, int64_t local_blocks,
                        const std::string& scorer, bool causal, const OptionalTensor& q_offsets,
                        const OptionalTensor& kv_lens, const OptionalTensor& mask, const OptionalTensor& block_sums) {
  return select_blocks(query, key, {block, top_blocks, local_blocks, scorer}, {causal, q_offsets, kv_lens, mask},
                       block_sums);
}

py::object latent_attend_py(const GivenArguments& given) {
  Tensor query, latent, k_rope;
  OptionalTensor kv_b;
  int64_t v_dim = 0;
  std::string path;
  LatentAttendOptions options;
  const RopeSettings* rope = nullptr;
  std::optional<LatentTensors> cache;
  bool need_weights = false, at_names = false;
  given.read([&](const auto& visit) {
    visit("query", query);
    visit("latent", latent);
    visit("k_rope", k_rope);
    visit("kv_b", kv_b);
    visit("v_dim", v_dim);
    visit("path", path);
    visit("need_weights", need_weights);
    visit_inputs(visit, rope, options);
    visit("cache", cache);
    visit("key_index", options.key_index);
    visit_rules(visit, options);
    visit("at_names", at_names);
  });
  check_weights(need_weights, at_names);
  if (rope) options.rope = *rope;
  if (cache) options.cache = CacheTensors{std::get<0>(*cache), Tensor(), std::get<1>(*cache)};
  if (need_weights)
    return py::cast(without_gil(
        [&] { return latent_attend_with_weights(query, latent, k_rope, kv_b, v_dim, path, options, at_names); }));
  return py::cast(without_gil([&] { return latent_attend(query, latent, k_rope, kv_b, v_dim, path, options); }));
}

std::tuple<Tensor, Tensor, Tensor> latent_project_py(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                                     const OptionalTensor& kv_b, int64_t v_dim, const std::string& path,
                                                     const RopeSettings* rope, const OptionalTensor& positions,
                                                     bool cross) {
  LatentAttendOptions options;
  if (rope) options.rope = *rope;
  options.positions = positions;
  options.cross = cross;
  return latent_project(query, latent, k_rope, kv_b, v_dim, path, options);
}

py::object linear_attention_py(const GivenArguments& given) {
  Tensor query, key, value;
  OptionalTensor log_decay, beta, initial_state, kv_lens, cu_seqlens;
  std::optional<double> scale;
  bool return_state = false;
  given.read([&](const auto& visit) {
    visit("query", query);
    visit("key", key);
    visit("value", value);
    visit("log_decay", log_decay);
    visit("beta", beta);
    visit("initial_state", initial_state);
    visit("kv_lens", kv_lens);
    visit("cu_seqlens", cu_seqlens);
    visit("scale", scale);
    visit("return_state", return_state);
  });
  const RecurrenceOptions options = RecurrenceOptions()
                                        .log_decay(log_decay)
                                        .beta(beta)
                                        .initial_state(initial_state)
                                        .kv_lens(kv_lens)
                                        .cu_seqlens(cu_seqlens)
                                        .scale(scale);
  return first_or_both(return_state, [&] { return linear_attention_with_state(query, key, value, options); });
}

Tensor linear_attention_in_place_py(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                    const OptionalTensor& log_decay, const OptionalTensor& beta,
                                    const OptionalTensor& kv_lens, const OptionalTensor& cu_seqlens,
                                    std::optional<double> scale) {
  return linear_attention_(
      query, key, value, state,
      RecurrenceOptions().log_decay(log_decay).beta(beta).kv_lens(kv_lens).cu_seqlens(cu_seqlens).scale(scale));
}

py::object causal_conv1d_py(const GivenArguments& given) {
  Tensor x, weight;
  OptionalTensor bias, initial_state, kv_lens, cu_seqlens;
  std::optional<std::string> activation;
  bool return_state = false;
  given.read([&](const auto& visit) {
    visit("x", x);
    visit("weight", weight);
    visit("bias", bias);
    visit("activation", activation);
    visit("initial_state", initial_state);
    visit("kv_lens", kv_lens);
    visit("cu_seqlens", cu_seqlens);
    visit("return_state", return_state);
  });
  const CausalConv1dOptions options = CausalConv1dOptions()
                                          .bias(bias)
                                          .activation(activation)
                                          .initial_state(initial_state)
                                          .kv_lens(kv_lens)
                                          .cu_seqlens(cu_seqlens);
  return first_or_both(return_state, [&] { return causal_conv1d_with_state(x, weight, options); });
}

py::dict default_rules() {
  py::dict defaults;
  ScoreRules::for_each_rule(ScoreRules(), [&](const char* name, const auto& rule) {
    if constexpr (std::is_same_v<std::decay_t<decltype(rule)>, Window>)
      defaults[name] = py::make_tuple(rule[0], rule[1]);
    else
      defaults[name] = py::cast(rule);
  });
  return defaults;
}

// Python's attnpack.nn.rope holds the same numbers as a tuple, for traced code.
void bind_rope_settings(py::module_& m) {
  using py::arg;
  using Numbers = std::vector<double>;
  const auto make = [](const Numbers& inv_freq, double factor, bool interleaved, const Numbers& long_inv_freq,
                       double growth, int64_t trained_len, bool raw_keys) {
    return RopeSettings{inv_freq, factor, interleaved, long_inv_freq, growth, trained_len, raw_keys};
  };
  const auto numbers = [](const RopeSettings& r) {
    return std::make_tuple(r.inv_freq, r.factor, r.interleaved, r.long_inv_freq, r.growth, r.trained_len, r.raw_keys);
  };
  py::class_<RopeSettings> cls(m, "RopeSettings", "How queries and keys are rotated, as attend takes it.");
  cls.def(py::init(make), arg("inv_freq"), arg("factor") = 1.0, arg("interleaved") = false,
          arg("long_inv_freq") = Numbers(), arg("growth") = 0.0, arg("trained_len") = 0, arg("raw_keys") = false)
      .def("numbers", numbers)
      .def(py::pickle(numbers, [make](const std::tuple<Numbers, double, bool, Numbers, double, int64_t, bool>& parts) {
        return std::apply(make, parts);
      }));
  show_rope_settings(cls, [](const RopeSettings& self) -> const RopeSettings& { return self; });
}

}  // namespace

void register_ops(py::module_& m) {
  bind_rope_settings(m);
  m.def("default_rules", &default_rules, "The rules of every operator, each with its default.");
  register_fast_path_function(m);
  add_public_function(m, {"attention", 3, 4, &attention_py});
  add_public_function(m, {"attention_scores", 2, 3, &attention_scores_py});
  add_fast_path({"attention_varlen", 4, 5, &attention_varlen_py<true>});
  add_keyword_function(m, "attention_varlen", 5, &attention_varlen_py<false>);
  add_public_function(m, {"merge_states", 4, 4, &merge_states_py});
  add_public_function(m, {"apply_rope", 3, 3, &apply_rope_py});
  add_public_function(m, {"linear_attention", 3, 3, &linear_attention_py});
  add_public_function(m, {"causal_conv1d", 2, 3, &causal_conv1d_py});
  add_keyword_function(m, "attend", 4, &attend_py);
  add_keyword_function(m, "attend_shared", 5, &attend_shared_py);
  add_keyword_function(m, "latent_attend", 7, &latent_attend_py);
  define(m, "gate_heads", &gate_heads, {"joined", "gate", "num_heads", "activation"});
  define(m, "pair_values", &pair_values, {"value"});
  define(m, "subtract_halves", &subtract_halves_py,
         {"joined", "num_heads", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init", "eps"});
  define(m, "subtract_pairs", &subtract_pairs, {"joined", "lambdas"});
  define(m, "select_keys", &select_keys_py,
         {"query", "key", "weights", "top_k", "causal", "q_offsets", "kv_lens", "mask", "local_keys"});
  define(m, "index_keys", &index_keys_py,
         {"query", "key", "weights", "top_k", "local_keys", "cache", "rope", "positions", "causal", "kv_lens", "mask"});
  define(m, "indexer_loss", &indexer_loss_py,
         {"query", "key", "weights", "probabilities", "key_index", "rope", "positions", "causal", "kv_lens", "mask",
          "at_names"});
  define(m, "select_blocks", &select_blocks_py,
         {"query", "key", "block", "top_blocks", "local_blocks", "scorer", "causal", "q_offsets", "kv_lens", "mask",
          "block_sums"});
  define(m, "latent_project", &latent_project_py,
         {"query", "latent", "k_rope", "kv_b", "v_dim", "path", "rope", "positions", "cross"});
  define(m, "sinusoidal_positions", &sinusoidal_positions, {"positions", "dim", "base"});
  define(m, "alibi_slopes", &alibi_slopes, {"num_heads"});
  define(m, "rope_table", &rope_table, {"positions", "inv_freq", "factor"});
  define(m, "rope_table_by_length", &rope_table_by_length,
         {"positions", "lengths", "inv_freq", "factor", "long_inv_freq", "growth", "trained_len"});
  define(m, "linear", &linear<>, {"input", "weight", "bias"});
  define(m, "linears", &linears, {"input", "weights", "biases"});
  define(m, "stored_linear", &stored_linear, {"input", "weight", "bias", "round_input"});
  define(m, "stored_linears", &stored_linears, {"input", "weights", "biases"});
  define(m, "to_stored", &to_stored, {"weight", "bits"});
  m.def("widen_stored", [](const Tensor& blocks, at::ScalarType dtype) {
    return without_gil([&] { return widen_stored(blocks, dtype); });
  });
  m.def("stored_rows", [](const Tensor& table, const Tensor& ids, at::ScalarType dtype) {
    return without_gil([&] { return stored_rows(table, ids, dtype); });
  });
  define(m, "stored_inputs", &stored_inputs, {"weight"});
  m.def("stored_layouts", [] {
    py::dict layouts;
    for (const StoredLayout& layout : kStoredLayouts)
      layouts[layout.name] = py::make_tuple(layout.numbers, layout.bytes);
    return layouts;
  });
  define(m, "linear_attention_", &linear_attention_in_place_py,
         {"query", "key", "value", "state", "log_decay", "beta", "kv_lens", "cu_seqlens", "scale"});
  define(m, "rms_norm", &rms_norm, {"x", "weight", "eps"});
  define(m, "add_rms_norm", &add_rms_norm, {"x", "added", "weight", "eps"});
  define(m, "swiglu", &swiglu, {"gate", "up"});
  define(m, "quantize_rows", &quantize_rows, {"x", "bits"});
  m.def("dequantize_rows", [](const Tensor& rows, int64_t bits, int64_t dim, at::ScalarType dtype) {
    return without_gil([&] { return dequantize_rows(rows, bits, dim, dtype); });
  });
  define(m, "null", &null, {"x"});
  m.def("isa", &instruction_set);
  m.def("version", &version);
  m.def("cuda_kernels_run", [](int device) { return cuda_kernels(device) != nullptr; });
  m.def("linear_kernels", &describe_linear_kernels);
  m.def("last_level_cache_bytes", last_level_cache_bytes);
  m.def("read_bytes_per_second", [](const at::Tensor& data) {
    TORCH_CHECK(data.is_contiguous() && data.scalar_type() == at::kFloat && data.is_cpu(),
                "read_bytes_per_second: got ", data.toString(), ", want contiguous fp32 on the CPU");
    const py::gil_scoped_release release;
    return read_bytes_per_second(data);
  });
  m.def("limits", [] {
    const Limits limits = [] {
      py::gil_scoped_release free;
      return measure_limits();
    }();
    return std::make_tuple(limits.flops, limits.bf16_flops, limits.bytes_per_second);
  });
}

}  // namespace attnpack
