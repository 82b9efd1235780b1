#include <attnpack/distributed/detail/shared_children.h>

#include <attnpack/core/check.h>

#include <algorithm>

namespace attnpack::distributed {

namespace {

// The first one compares the ranks' inputs (ShardGroup::column_parallel).
constexpr SharedChild kGrouped[] = {
    {"q_proj", Part::kOutputs, true},
    {"q_a_proj", Part::kWhole, true},
    {"q_a_layernorm", Part::kWhole},
    {"q_b_proj", Part::kOutputs},
    {"gate_proj", Part::kOutputs, true},
    {"k_proj", Part::kKeys, true},
    {"v_proj", Part::kKeys, true},
    {"q_norm", Part::kWhole},
    {"k_norm", Part::kWhole},
    {"sinks", Part::kOutputs},
    {"o_proj", Part::kInputs},
};
constexpr SharedChild kLatent[] = {
    {"q_proj", Part::kOutputs, true}, {"q_a_proj", Part::kWhole, true},    {"q_a_layernorm", Part::kWhole},
    {"q_b_proj", Part::kOutputs},     {"gate_proj", Part::kOutputs, true}, {"kv_a_proj_with_mqa", Part::kWhole, true},
    {"kv_a_layernorm", Part::kWhole}, {"kv_b_proj", Part::kOutputs},       {"o_proj", Part::kInputs},
};
constexpr SharedChild kFeedForward[] = {
    {"gate_proj", Part::kOutputs, true},
    {"up_proj", Part::kOutputs, true},
    {"down_proj", Part::kInputs},
};

}  // namespace

c10::ArrayRef<SharedChild> shared_children(std::string_view kind) {
  if (kind == "GroupedQueryAttention") return kGrouped;
  if (kind == "MultiHeadLatentAttention") return kLatent;
  if (kind == "FeedForward") return kFeedForward;
  ATTNPACK_CHECK(false, "kind: got '", kind, "', want a class of modules that ranks share");
}

const char* part_of_parameter(std::string_view kind, const std::string& owner, const std::string& name) {
  const auto dot = std::min(name.find('.'), name.size());
  const auto child = std::string_view(name).substr(0, dot), rest = std::string_view(name).substr(dot);
  const auto children = shared_children(kind);
  const auto found = std::find_if(children.begin(), children.end(), [&](const auto& one) { return child == one.name; });
  ATTNPACK_CHECK(found != children.end() && (rest.empty() || rest == ".weight" || rest == ".bias"), owner,
                 " has a parameter '", name, "', which tensor_parallel does not know how to shard: call it before ",
                 "layers are wrapped, or leave this module out");
  switch (found->part) {
    case Part::kOutputs:
      return "outputs";
    case Part::kKeys:
      return "keys";
    case Part::kInputs:
      return rest == ".bias" ? "added" : "inputs";
    case Part::kWhole:
      return "whole";
  }
  ATTNPACK_CHECK(false, "part: got ", static_cast<int>(found->part), ", want one of the parts");
}

void check_heads(const std::string& owner, int64_t num_heads, int64_t ranks) {
  ATTNPACK_CHECK(num_heads % ranks == 0, "num_heads: got ", num_heads, " heads of ", owner, " for ", ranks,
                 " ranks, want a number that the ranks divide: take fewer ranks");
}

void check_norm_of_heads(bool all_heads, int64_t num_heads) {
  ATTNPACK_CHECK(!all_heads, "qk_norm: got a norm over all ", num_heads, " heads, of which a rank has a share, want ",
                 "one over head_dim: leave the layer whole, or share the batch or the sequence instead");
}

}  // namespace attnpack::distributed
