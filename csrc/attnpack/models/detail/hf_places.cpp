#include <attnpack/models/detail/hf_places.h>

#include <ATen/ATen.h>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

using at::Tensor;

HfPlace place_of(const std::string& name, std::string_view prefix) {
  HfPlace place;
  std::string_view rest = name;
  if (rest.substr(0, prefix.size()) == prefix) {
    rest.remove_prefix(prefix.size());
    const auto end = rest.find('.');
    place.layer = "model.layers." + std::string(rest.substr(0, end)) + ".";
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  }
  const auto last = rest.rfind('.');
  place.module = rest.substr(0, last == rest.npos ? 0 : last);
  place.parameter = rest.substr(last == rest.npos ? 0 : last + 1);
  return place;
}

std::string joined(const HfPlace& place, const std::string& module) {
  return place.layer + module + "." + place.parameter;
}

std::vector<HfPart> whole(const std::string& name) { return {{name, nullptr}}; }

std::vector<HfPart> renamed(const std::string& name, const HfPlace& place, const HfNames& names) {
  for (const auto& [theirs, ours] : names)
    if (theirs == place.module) return whole(joined(place, ours));
  return whole(name);
}

Tensor half_of_rows(const Tensor& x, int64_t which) {
  refuse_unless(x.dim() > 0 && x.size(0) % 2 == 0, "it has an odd number of rows");
  return x.narrow(0, which * (x.size(0) / 2), x.size(0) / 2);
}

std::vector<HfPart> gate_and_up(const HfPlace& place, const std::string& module) {
  return {{joined(place, module + "gate_proj"), [](const Tensor& x) { return half_of_rows(x, 0); }},
          {joined(place, module + "up_proj"), [](const Tensor& x) { return half_of_rows(x, 1); }}};
}

std::vector<HfPart> expert_parts(const HfPlace& place, int64_t num_experts, bool down, bool transposed) {
  std::vector<HfPart> parts;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const auto matrix = [=](const Tensor& x) {
      refuse_unless(x.dim() == 3 && x.size(0) == num_experts, "it holds other than ", num_experts, " experts");
      return transposed ? x.select(0, expert).t() : x.select(0, expert);
    };
    const auto add = [&](const char* name, std::function<Tensor(const Tensor&)> cut) {
      parts.push_back({text_of({place.layer, "mlp.experts.", expert, ".", name, ".weight"}), std::move(cut)});
    };
    if (down) {
      add("down_proj", matrix);
    } else {
      add("gate_proj", [=](const Tensor& x) { return half_of_rows(matrix(x), 0); });
      add("up_proj", [=](const Tensor& x) { return half_of_rows(matrix(x), 1); });
    }
  }
  return parts;
}

}  // namespace attnpack
