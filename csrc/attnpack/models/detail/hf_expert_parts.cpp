#include <ATen/ATen.h>

#include <attnpack/models/detail/hf_places.h>

namespace attnpack {

namespace {

// The experts' tensors as transformers has them in memory: mlp.experts.gate_up_proj [experts, 2 * hidden, E] and
// mlp.experts.down_proj [experts, E, hidden].
bool is_packed(const HfPlace& place, const CausalLMOptions& o) { return o.experts() && place.module == "mlp.experts"; }

std::vector<HfPart> packed(const HfPlace& place, const CausalLMOptions& o, bool transposed = false) {
  return expert_parts(place, o.experts()->num_experts(), place.parameter == "down_proj", transposed);
}

}  // namespace

std::vector<HfPart> packed_experts_parts(const std::string& name, const CausalLMOptions& o) {
  const auto place = place_of(name, "model.layers.");
  return is_packed(place, o) ? packed(place, o) : whole(name);
}

// Mixtral and MiniMax-M2: block_sparse_moe.experts.3.w1 is a gate, w3 is up, w2 is down.
std::vector<HfPart> mixtral_parts(const std::string& name, const CausalLMOptions& o) {
  static const std::string theirs = "block_sparse_moe.";
  auto place = place_of(name, "model.layers.");
  if (place.module.starts_with(theirs) || place.module + "." == theirs)
    place.module.replace(0, theirs.size() - 1, "mlp");
  if (is_packed(place, o)) return packed(place, o);
  if (place.layer.empty() || !place.module.starts_with("mlp")) return whole(name);
  if (place.parameter == "e_score_correction_bias") return whole(joined(place, "mlp.gate"));
  for (const auto& [w, ours] : HfNames{{".w1", "gate_proj"}, {".w2", "down_proj"}, {".w3", "up_proj"}})
    if (place.module.ends_with(w))
      return whole(joined(place, place.module.substr(0, place.module.size() - w.size() + 1) + ours));
  return whole(joined(place, place.module));
}

// Without experts the shared one is the feed-forward.
std::vector<HfPart> granite_hybrid_parts(const std::string& name, const CausalLMOptions& o) {
  auto place = place_of(name, "model.layers.");
  if (place.module.starts_with("mamba")) {
    place.module.replace(0, 5, "self_attn");
    return whole(joined(place, place.module));
  }
  const std::string shared = o.experts() ? "mlp.shared_experts." : "mlp.";
  if (place.module == "shared_mlp.input_linear") return gate_and_up(place, shared);
  if (place.module == "shared_mlp.output_linear") return whole(joined(place, shared + "down_proj"));
  if (!o.experts()) return whole(name);
  const auto count = o.experts()->num_experts();
  if (place.module == "block_sparse_moe.router.layer") return whole(joined(place, "mlp.gate"));
  if (place.module == "block_sparse_moe.input_linear") return expert_parts(place, count, /*down=*/false);
  if (place.module == "block_sparse_moe.output_linear") return expert_parts(place, count, /*down=*/true);
  return whole(name);
}

// Its experts are [experts, E, 2 * hidden] and [experts, hidden, E].
std::vector<HfPart> llama4_parts(const std::string& name, const CausalLMOptions& o) {
  static const std::string theirs = "feed_forward.";
  auto place = place_of(name, "model.layers.");
  if (place.layer.empty() || !place.module.starts_with(theirs)) return whole(name);
  place.module.replace(0, theirs.size(), "mlp.");
  if (is_packed(place, o)) return packed(place, o, /*transposed=*/true);
  static const std::string shared = "mlp.shared_expert.";
  if (place.module.starts_with(shared)) place.module.replace(0, shared.size(), "mlp.shared_experts.");
  return whole(joined(place, place.module == "mlp.router" ? "mlp.gate" : place.module));
}

}  // namespace attnpack
