#include <attnpack/models/detail/checkpoint_checks.h>

#include <attnpack/modules/state_dict.h>
#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/json.h>

#include <tuple>

namespace attnpack {

namespace {

constexpr uint64_t kWidest =
    1 << 20;  // of heads * head_dim: a layer holds a number per head, RoPE one per pair of dims
constexpr std::string_view kLayers = "model.layers.";

// "a, b, c and 4 more"
std::string some(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < 3; ++i) (text += i == 0 ? "" : ", ") += excerpt(names[i]);
  return names.size() > 3 ? text_of({text, " and ", names.size() - 3, " more"}) : text;
}

std::string listed(const std::vector<uint64_t>& sizes) { return text_of({"[", joined_by(", ", sizes), "]"}); }

void add_shapes(Shapes& to, const torch::nn::Module& module, const std::string& prefix = "") {
  for (const auto& [name, tensor] : state_dict(module))
    to[prefix + name] = std::vector<uint64_t>(tensor.sizes().begin(), tensor.sizes().end());
}

// The shapes of a layer of that kind, without "model.layers.N.".
struct OneLayer {
  Shapes layer, outside;
};

OneLayer shapes_of_one_layer(const std::string& path, CausalLMOptions options, const LayerSettings& layer) {
  Factory factory;
  factory.device = at::kMeta;
  factory.dtype = at::kFloat;
  const auto num_layers = options.num_layers();
  std::vector<LayerSettings> layers{layer};
  if (layer.kv_from()) {  // it reads another, which stands before it
    layers.insert(layers.begin(), options.layer_settings().at(*layer.kv_from()));
    layers.back().kv_from(0);
  }
  options.num_layers(static_cast<int64_t>(layers.size())).layer_settings(layers).factory(factory);
  Shapes shapes;
  naming(path, "its configuration makes no model", kGetFileAgain, [&] {
    const CausalLM model(options);
    add_shapes(shapes, *model);
    if (auto table = model->model->layer_inputs) {
      auto of_all = table->options;
      add_shapes(shapes, *LayerInputTable(of_all.num_layers(num_layers)), "model.layer_inputs.");
    }
    return true;
  });
  OneLayer made;
  const auto prefix = std::string(kLayers) + std::to_string(layers.size() - 1) + ".";
  for (const auto& [name, shape] : shapes) {
    if (name.starts_with(prefix))
      made.layer[name.substr(prefix.size())] = shape;
    else if (!name.starts_with(kLayers))
      made.outside[name] = shape;
  }
  return made;
}

// The settings on which the shapes of a layer depend.
auto kind_of(const LayerSettings& layer) {
  return std::tuple(layer.experts(), layer.qk_norm(), layer.num_kv_heads(), layer.head_dim(), layer.hidden_dim(),
                    layer.keys_as_values(), layer.kv_from().has_value(), layer.recurrent(), layer.layout());
}

// num_tensors: of the checkpoint. If the model has far more, a list of their names would cost much.
Shapes expected_shapes(const std::string& path, uint64_t num_tensors, const CausalLMOptions& options) {
  std::map<decltype(kind_of({})), OneLayer> kinds;
  Shapes expected;
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) {
    const auto settings = options.layer_settings().empty() ? LayerSettings() : options.layer_settings()[layer];
    const auto kind = kind_of(settings);
    if (!kinds.count(kind)) kinds[kind] = shapes_of_one_layer(path, options, settings);
    refuse_unless(expected.size() <= 2 * num_tensors + 1000, path, ": its configuration asks for ",
                  options.num_layers(), " layers, of which ", layer, " have ", expected.size(), " tensors, but it has ",
                  num_tensors, "; the configuration is of another checkpoint, get both again");
    for (const auto& [name, shape] : kinds[kind].layer)
      expected[std::string(kLayers) + std::to_string(layer) + "." + name] = shape;
    expected.insert(kinds[kind].outside.begin(), kinds[kind].outside.end());
  }
  return expected;
}

}  // namespace

void check_sizes(const std::string& path, uint64_t num_tensors, uint64_t num_layers, uint64_t heads,
                 uint64_t head_dim) {
  refuse_unless(num_layers <= num_tensors, path, ": its configuration asks for ", num_layers, " layers, but it has ",
                num_tensors, " tensors; the configuration is of another checkpoint, get both again");
  uint64_t width = 0;
  const bool overflows = __builtin_mul_overflow(heads, head_dim, &width);
  refuse_unless(!overflows && width <= kWidest, path, ": its configuration asks for ", heads, " heads of head_dim ",
                head_dim, ", together ", kWidest, " is the most; ", kGetAgain);
}

Shapes check_checkpoint_tensors(const std::string& path, const Shapes& found, const CausalLMOptions& options) {
  auto expected = expected_shapes(path, found.size(), options);
  std::vector<std::string> missing, extra;
  for (const auto& [name, shape] : expected)
    if (!found.count(name)) missing.push_back(name);
  for (const auto& [name, shape] : found)
    if (!expected.count(name)) extra.push_back(name);
  refuse_unless(missing.empty() && extra.empty(), path, ": ",
                missing.empty() ? std::string() : text_of({"lacks ", some(missing)}),
                missing.empty() || extra.empty() ? "" : " and ",
                extra.empty() ? std::string() : text_of({"has unexpected ", some(extra)}),
                "; its configuration asks for other tensors, ", kGetAgain);
  for (const auto& [name, shape] : expected) {
    refuse_unless(found.at(name) == shape, path, ": ", name, " has shape ", listed(found.at(name)),
                  ", its configuration asks for ", listed(shape), "; ", kGetAgain);
  }
  return expected;
}

}  // namespace attnpack
