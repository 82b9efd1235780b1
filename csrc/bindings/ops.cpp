#include <bindings/torch_pybind.h>

#include <attnpack/layers/alibi.h>
#include <attnpack/layers/attend.h>
#include <attnpack/layers/detail/latent_algebra.h>
#include <attnpack/layers/latent_attend.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/machine_speed.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/merge_states.h>
#include <attnpack/ops/null.h>
#include <attnpack/ops/rms_norm.h>
#include <attnpack/ops/rope.h>

// The operators for eager Python. Python calls them through here and not through torch.ops, because a call costs less
// this way (PERFORMANCE.md).
namespace attnpack {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using HeadMap = std::optional<std::vector<int64_t>>;

// int, tensor [B] or "end".
QOffset to_q_offset(const py::object& q_offset) {
  if (THPVariable_Check(q_offset.ptr())) return q_offset.cast<Tensor>();
  if (PyIndex_Check(q_offset.ptr())) {  // numpy's ints too
    int overflow = 0;
    const auto number = PyLong_AsLongLongAndOverflow(py::int_(q_offset).ptr(), &overflow);
    if (overflow == 0) return static_cast<int64_t>(number);
  }
  if (py::isinstance<py::str>(q_offset) && q_offset.cast<std::string>() == "end") return End{};
  throw py::value_error("attnpack: q_offset is " + py::repr(q_offset).cast<std::string>() +
                        ", wants an int, an integer tensor [batch] or \"end\"");
}

AttentionOptions make_options(const OptionalTensor& mask, bool causal, const py::object& q_offset, Window window,
                              const OptionalTensor& kv_lens, double softcap, const OptionalTensor& sinks,
                              const OptionalTensor& alibi_slopes, const HeadMap& head_map, double dropout_p,
                              std::optional<double> scale) {
  return AttentionOptions()
      .mask(mask)
      .causal(causal)
      .q_offset(to_q_offset(q_offset))
      .window(window)
      .kv_lens(kv_lens)
      .softcap(softcap)
      .sinks(sinks)
      .alibi_slopes(alibi_slopes)
      .head_map(head_map)
      .dropout_p(dropout_p)
      .scale(scale);
}

py::object attention_py(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                        bool causal, const py::object& q_offset, Window window, const OptionalTensor& kv_lens,
                        double softcap, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                        const HeadMap& head_map, double dropout_p, std::optional<double> scale, bool return_lse) {
  const AttentionOptions options =
      make_options(mask, causal, q_offset, window, kv_lens, softcap, sinks, alibi_slopes, head_map, dropout_p, scale);
  std::tuple<Tensor, Tensor> result;
  {
    const py::gil_scoped_release no_gil;
    result = attention_with_lse(query, key, value, options);
  }
  return return_lse ? py::cast(std::move(result)) : py::cast(std::get<0>(std::move(result)));
}

Tensor attention_scores_py(const Tensor& query, const Tensor& key, const OptionalTensor& mask, const std::string& stage,
                           bool causal, const py::object& q_offset, Window window, const OptionalTensor& kv_lens,
                           double softcap, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                           const HeadMap& head_map, double dropout_p, std::optional<double> scale) {
  const AttentionOptions options =
      make_options(mask, causal, q_offset, window, kv_lens, softcap, sinks, alibi_slopes, head_map, dropout_p, scale);
  const py::gil_scoped_release no_gil;
  return attention_scores(query, key, options, stage);
}

using Cache = std::optional<std::tuple<Tensor, Tensor, Tensor>>;
using LatentCache = std::optional<std::tuple<Tensor, Tensor>>;

LayerInputs to_inputs(const RopeSettings* rope, const OptionalTensor& positions, bool cross, const OptionalTensor& mask,
                      bool causal, const OptionalTensor& kv_lens, double dropout_p, std::optional<double> scale) {
  return {.rope = rope ? std::make_optional(*rope) : std::nullopt,
          .positions = positions,
          .cross = cross,
          .mask = mask,
          .causal = causal,
          .kv_lens = kv_lens,
          .dropout_p = dropout_p,
          .scale = scale};
}

py::object attend_py(const Tensor& query, const Tensor& key, const Tensor& value, const RopeSettings* rope,
                     const OptionalTensor& positions, bool cross, const Cache& cache, const OptionalTensor& mask,
                     bool causal, const OptionalTensor& kv_lens, Window window, double softcap,
                     const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, const HeadMap& head_map,
                     double dropout_p, std::optional<double> scale, bool need_weights) {
  AttendOptions options{to_inputs(rope, positions, cross, mask, causal, kv_lens, dropout_p, scale)};
  if (cache) options.cache = CacheTensors{std::get<0>(*cache), std::get<1>(*cache), std::get<2>(*cache)};
  options.window = window;
  options.softcap = softcap;
  options.sinks = sinks;
  options.alibi_slopes = alibi_slopes;
  options.head_map = head_map;
  std::tuple<Tensor, Tensor> result;
  {
    const py::gil_scoped_release no_gil;
    if (need_weights)
      result = attend_with_weights(query, key, value, options);
    else
      std::get<0>(result) = attend(query, key, value, options);
  }
  return need_weights ? py::cast(std::move(result)) : py::cast(std::get<0>(std::move(result)));
}

py::object latent_attend_py(const Tensor& query, const Tensor& latent, const Tensor& k_rope, const OptionalTensor& kv_b,
                            int64_t v_dim, const std::string& path, const RopeSettings* rope,
                            const OptionalTensor& positions, bool cross, const LatentCache& cache,
                            const OptionalTensor& mask, bool causal, const OptionalTensor& kv_lens, double dropout_p,
                            std::optional<double> scale, bool need_weights) {
  LatentAttendOptions options{to_inputs(rope, positions, cross, mask, causal, kv_lens, dropout_p, scale)};
  if (cache) options.cache = CacheTensors{std::get<0>(*cache), Tensor(), std::get<1>(*cache)};
  std::tuple<Tensor, Tensor> result;
  {
    const py::gil_scoped_release no_gil;
    if (need_weights)
      result = latent_attend_with_weights(query, latent, k_rope, kv_b, v_dim, path, options);
    else
      std::get<0>(result) = latent_attend(query, latent, k_rope, kv_b, v_dim, path, options);
  }
  return need_weights ? py::cast(std::move(result)) : py::cast(std::get<0>(std::move(result)));
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
  py::class_<RopeSettings>(m, "RopeSettings", "How queries and keys are rotated, as attend takes it.")
      .def(py::init(make), arg("inv_freq"), arg("factor") = 1.0, arg("interleaved") = false,
           arg("long_inv_freq") = Numbers(), arg("growth") = 0.0, arg("trained_len") = 0, arg("raw_keys") = false)
      .def("numbers", numbers)
      .def(py::pickle(numbers, [make](const std::tuple<Numbers, double, bool, Numbers, double, int64_t, bool>& parts) {
        return std::apply(make, parts);
      }));
}

}  // namespace

void register_ops(py::module_& m) {
  using py::arg;
  bind_rope_settings(m);
  const auto none = py::none();
  const Window unbounded{-1, -1};
  m.def("attention", &attention_py, arg("query"), arg("key"), arg("value"), arg("mask") = none, arg("causal") = false,
        arg("q_offset") = 0, arg("window") = unbounded, arg("kv_lens") = none, arg("softcap") = 0.0,
        arg("sinks") = none, arg("alibi_slopes") = none, arg("head_map") = none, arg("dropout_p") = 0.0,
        arg("scale") = none, arg("return_lse") = false);
  m.def("attention_scores", &attention_scores_py, arg("query"), arg("key"), arg("mask") = none, arg("stage") = "probs",
        arg("causal") = false, arg("q_offset") = 0, arg("window") = unbounded, arg("kv_lens") = none,
        arg("softcap") = 0.0, arg("sinks") = none, arg("alibi_slopes") = none, arg("head_map") = none,
        arg("dropout_p") = 0.0, arg("scale") = none);
  m.def("attend", &attend_py, arg("query"), arg("key"), arg("value"), arg("rope") = none, arg("positions") = none,
        arg("cross") = false, arg("cache") = none, arg("mask") = none, arg("causal") = false, arg("kv_lens") = none,
        arg("window") = unbounded, arg("softcap") = 0.0, arg("sinks") = none, arg("alibi_slopes") = none,
        arg("head_map") = none, arg("dropout_p") = 0.0, arg("scale") = none, arg("need_weights") = false);
  m.def("latent_attend", &latent_attend_py, arg("query"), arg("latent"), arg("k_rope"), arg("kv_b"), arg("v_dim"),
        arg("path"), arg("rope") = none, arg("positions") = none, arg("cross") = false, arg("cache") = none,
        arg("mask") = none, arg("causal") = false, arg("kv_lens") = none, arg("dropout_p") = 0.0, arg("scale") = none,
        arg("need_weights") = false);
  const auto released = py::call_guard<py::gil_scoped_release>();
  m.def(
      "latent_project",
      [](const Tensor& query, const Tensor& latent, const Tensor& k_rope, const OptionalTensor& kv_b, int64_t v_dim,
         const std::string& path, const RopeSettings* rope, const OptionalTensor& positions, bool cross) {
        return latent_project(
            query, latent, k_rope, kv_b, v_dim, path,
            {to_inputs(rope, positions, cross, std::nullopt, false, std::nullopt, 0.0, std::nullopt)});
      },
      arg("query"), arg("latent"), arg("k_rope"), arg("kv_b"), arg("v_dim"), arg("path"), arg("rope"), arg("positions"),
      arg("cross"), released);
  m.def("fold_latent", &fold_weights, arg("query"), arg("kv_b"), arg("out"), arg("num_heads"), released);
  m.def("merge_states", &merge_states, arg("out_a"), arg("lse_a"), arg("out_b"), arg("lse_b"), released);
  m.def("apply_rope", &apply_rope, arg("x"), arg("cos"), arg("sin"), arg("interleaved") = false, released);
  m.def("alibi_slopes", &alibi_slopes, py::arg("num_heads"));
  m.def(
      "rope_table",
      [](const Tensor& positions, const std::vector<double>& inv_freq, double factor) {
        return rope_table(positions, inv_freq, factor);
      },
      arg("positions"), arg("inv_freq"), arg("factor") = 1.0, released);
  m.def(
      "rope_table_by_length",
      [](const Tensor& positions, const OptionalTensor& lengths, const std::vector<double>& inv_freq, double factor,
         const std::vector<double>& long_inv_freq, double growth, int64_t trained_len) {
        return rope_table_by_length(positions, lengths, inv_freq, factor, long_inv_freq, growth, trained_len);
      },
      arg("positions"), arg("lengths"), arg("inv_freq"), arg("factor"), arg("long_inv_freq"), arg("growth"),
      arg("trained_len"), released);
  m.def("linear", &linear<>, arg("input"), arg("weight"), arg("bias") = none, released);
  m.def(
      "linears",
      [](const at::Tensor& input, const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases) {
        return linears(input, weights, biases);
      },
      arg("input"), arg("weights"), arg("biases"), released);
  m.def("rms_norm", &rms_norm, arg("x"), arg("weight"), arg("eps"), released);
  m.def("null", &null, arg("x"), released);
  m.def("isa", &isa_name);
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
