#include <attnpack/distributed/detail/shared_children.h>

#include <attnpack/core/check.h>

#include <algorithm>

namespace attnpack::distributed {

namespace {

// The first one compares the ranks' inputs (ShardGroup::column_parallel).
constexpr SharedChild kGrouped[] = {
    {"q_proj", ParallelStyle::kOutputs, true},
    {"q_a_proj", ParallelStyle::kWhole, true},
    {"q_a_layernorm", ParallelStyle::kWhole},
    {"q_b_proj", ParallelStyle::kOutputs},
    {"gate_proj", ParallelStyle::kOutputs, true},
    {"k_proj", ParallelStyle::kKeys, true},
    {"v_proj", ParallelStyle::kKeys, true},
    {"q_norm", ParallelStyle::kWhole},
    {"k_norm", ParallelStyle::kWhole},
    {"sinks", ParallelStyle::kOutputs},
    {"o_proj", ParallelStyle::kInputs},
};
constexpr SharedChild kLatent[] = {
    {"q_proj", ParallelStyle::kOutputs, true},    {"q_a_proj", ParallelStyle::kWhole, true},
    {"q_a_layernorm", ParallelStyle::kWhole},     {"q_b_proj", ParallelStyle::kOutputs},
    {"gate_proj", ParallelStyle::kOutputs, true}, {"kv_a_proj_with_mqa", ParallelStyle::kWhole, true},
    {"kv_a_layernorm", ParallelStyle::kWhole},    {"kv_b_proj", ParallelStyle::kOutputs},
    {"o_proj", ParallelStyle::kInputs},
};
constexpr SharedChild kFeedForward[] = {
    {"gate_proj", ParallelStyle::kOutputs, true},
    {"up_proj", ParallelStyle::kOutputs, true},
    {"down_proj", ParallelStyle::kInputs},
};

}  // namespace

c10::ArrayRef<SharedChild> shared_children(std::string_view kind) {
  if (kind == "GroupedQueryAttention") return kGrouped;
  if (kind == "MultiHeadLatentAttention") return kLatent;
  if (kind == "FeedForward") return kFeedForward;
  ATTNPACK_CHECK(false, "kind: got '", kind, "', want a class of modules that ranks share");
}

const char* style_of_parameter(std::string_view kind, const std::string& owner, const std::string& name) {
  const auto dot = std::min(name.find('.'), name.size());
  const auto child = std::string_view(name).substr(0, dot), rest = std::string_view(name).substr(dot);
  const auto children = shared_children(kind);
  const auto found = std::find_if(children.begin(), children.end(), [&](const auto& one) { return child == one.name; });
  ATTNPACK_CHECK(found != children.end() && (rest.empty() || rest == ".weight" || rest == ".bias"), owner,
                 " has a parameter '", name, "', which tensor_parallel does not know how to shard: call it before ",
                 "layers are wrapped, or leave this module out");
  switch (found->style) {
    case ParallelStyle::kOutputs:
      return "outputs";
    case ParallelStyle::kKeys:
      return "keys";
    case ParallelStyle::kInputs:
      return rest == ".bias" ? "added" : "inputs";
    case ParallelStyle::kWhole:
      return "whole";
  }
  ATTNPACK_CHECK(false, "style: got ", static_cast<int>(found->style), ", want one of the styles");
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
