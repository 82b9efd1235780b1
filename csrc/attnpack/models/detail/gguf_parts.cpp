#include <attnpack/models/detail/gguf_parts.h>

#include <ATen/ATen.h>

namespace attnpack {

using at::Tensor;

GgufRecipe one_part(const char* source, const char* target, const GgufChange& change, bool rows) {
  const auto make = [=](const std::vector<Tensor>& x) { return std::vector<Tensor>{change ? change(x[0]) : x[0]}; };
  return {{source}, {target}, make, rows};
}

GgufRecipe two_parts(const char* source, const char* first, const char* second, int64_t heads, int64_t first_rows,
                     int64_t second_rows) {
  const auto make = [=](const std::vector<Tensor>& sources) {
    const auto& x = sources[0];
    const auto whole = x.unflatten(0, {heads, first_rows + second_rows});
    auto sizes = x.sizes().vec();
    sizes[0] = -1;
    return std::vector<Tensor>{whole.narrow(1, 0, first_rows).reshape(sizes),
                               whole.narrow(1, first_rows, second_rows).reshape(sizes)};
  };
  return {{source}, {first, second}, make, true};
}

Tensor log_decay(const Tensor& x) { return (-x).log(); }

Tensor channels_first(const Tensor& x) { return x.reshape({-1, 1, x.size(-1)}); }

GgufChange group_heads(int64_t groups, int64_t heads, int64_t first, int64_t dim) {
  return [=](const Tensor& x) {
    const auto before = x.narrow(dim, 0, first), turns = x.narrow(dim, first, x.size(dim) - first);
    const auto by_turn = turns.unflatten(dim, {heads / groups, groups, -1});
    return at::cat({before, by_turn.transpose(dim, dim + 1).reshape(turns.sizes())}, dim);
  };
}

GgufRecipe latent_halves() {
  const auto make = [](const std::vector<Tensor>& halves) {
    return std::vector<Tensor>{at::cat({halves[0].transpose(1, 2), halves[1]}, 1).flatten(0, 1)};
  };
  return {{"attn_k_b.weight", "attn_v_b.weight"}, {"self_attn.kv_b_proj.weight"}, make};
}

}  // namespace attnpack
