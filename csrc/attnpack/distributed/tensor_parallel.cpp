#include <attnpack/distributed/tensor_parallel.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/agreement.h>
#include <attnpack/distributed/detail/heads.h>
#include <attnpack/layers/alibi.h>
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/grouped_attention.h>
#include <attnpack/modules/latent_attention.h>

#include <functional>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace attnpack::distributed {

namespace {

// A layer whose outputs the ranks share: each of them gives a part of the gradient of its input.
class Columns : public LinearShare {
 public:
  // The first one in a call compares the ranks' shapes: gloo ends a process where they differ.
  Columns(Group group, bool first) : group_(std::move(group)), first_(first) {}
  at::Tensor enter(const at::Tensor& x) const override {
    if (first_) agree("a module", group_, x.device(), {{"x", shown(x)}});
    return copied(x, group_);
  }

 private:
  Group group_;
  bool first_;
};

// A layer whose inputs the ranks share: its output is the sum of theirs.
class Rows : public LinearShare {
 public:
  explicit Rows(Group group) : group_(std::move(group)) {}
  at::Tensor leave(const at::Tensor& out) const override { return summed(out, group_); }

 private:
  Group group_;
};

// The rows of a parameter that each rank holds, of `size`.
struct RankRows {
  int64_t size;
  std::vector<at::Tensor> of;
};

// The rows that the heads of each rank are, of `dim` rows each.
RankRows rows_of(const std::vector<std::vector<int64_t>>& heads, int64_t num_heads, int64_t dim) {
  RankRows rows{num_heads * dim, {}};
  for (const auto& own : heads)
    rows.of.push_back((at::tensor(own, at::kLong).unsqueeze(1) * dim + at::arange(dim)).flatten());
  return rows;
}

// The rows of consecutive heads, or hidden numbers, of `dim` rows each.
RankRows rows_of_share(int64_t size, int64_t dim, const Group& group) {
  RankRows rows{size * dim, {}};
  for (int64_t rank = 0; rank < group->getSize(); ++rank) {
    const auto share = share_of(size, group->getSize(), rank);
    rows.of.push_back(at::arange(share.first * dim, (share.first + share.count) * dim));
  }
  return rows;
}

// Shares parameters out, and remembers how.
class Sharing {
 public:
  explicit Sharing(Group group) : group_(std::move(group)) {}

  const Group& group() const { return group_; }
  const at::Tensor& own(const RankRows& rows) const { return rows.of[group_->getRank()]; }

  // Puts a parameter's rows along `dim` in its place.
  void keep(ParameterOwner& owner, const std::string& name, const at::Tensor& whole, int64_t dim,
            const RankRows& rows) {
    const bool wanted = whole.requires_grad();
    const auto part = whole.detach().index_select(dim, own(rows).to(whole.device())).set_requires_grad(wanted);
    owner.assign_parameter(name, part);
    kept_.emplace(part.unsafeGetTensorImpl(), TensorShares::Share{dim, rows.size, rows.of});
  }

  void keep_outputs(Linear& layer, const RankRows& rows) {
    keep(*layer, "weight", layer->weight, 0, rows);
    if (layer->bias.defined()) keep(*layer, "bias", layer->bias, 0, rows);
    layer->options.out_features(own(rows).numel());
  }

  void keep_inputs(Linear& layer, const RankRows& rows) {
    keep(*layer, "weight", layer->weight, 1, rows);
    layer->options.in_features(own(rows).numel());
    layer->share = std::make_shared<Rows>(group_);
  }

  // Layers whose outputs the ranks share, of one module.
  void columns(Linear& layer) { layer->share = std::make_shared<Columns>(group_, std::exchange(first_, false)); }

  // The shares of the module's parameters, by name.
  TensorShares shares_of(const torch::nn::Module& module) const {
    std::map<std::string, TensorShares::Share> shares;
    for (const auto& [name, parameter] : state_dict(module)) {
      const auto found = kept_.find(parameter.unsafeGetTensorImpl());
      if (found != kept_.end()) shares.emplace(name, found->second);
    }
    return {group_, std::move(shares)};
  }

 private:
  Group group_;
  bool first_ = true;
  std::unordered_map<const at::TensorImpl*, TensorShares::Share> kept_;
};

// The gradient of a parameter that all ranks hold, each for its own heads, is the sum of theirs. `rows` are those that
// the ranks hold; none for all.
void sum_gradient(const at::Tensor& parameter, const Sharing& sharing, const RankRows* rows = nullptr) {
  if (!parameter.defined()) return;
  const bool wanted = parameter.requires_grad();
  parameter.set_requires_grad(true);  // a hook needs it, also that of a parameter which is frozen for now
  parameter.register_hook([group = sharing.group(), index = rows ? sharing.own(*rows) : at::Tensor(),
                           size = rows ? rows->size : 0](const at::Tensor& grad) {
    if (!index.defined()) return all_reduce(grad, group);
    auto sizes = grad.sizes().vec();
    sizes[0] = size;
    const auto here = index.to(grad.device());
    return all_reduce(at::zeros(sizes, grad.options()).index_copy(0, here, grad), group).index_select(0, here);
  });
  parameter.set_requires_grad(wanted);
}

void sum_gradients(const Linear& layer, const Sharing& sharing, const RankRows* rows = nullptr) {
  if (!layer) return;
  sum_gradient(layer->weight, sharing, rows);
  sum_gradient(layer->bias, sharing, rows);
}

void check_heads(const char* name, int64_t num_heads, double dropout, const Group& group) {
  ATTNPACK_CHECK(num_heads % group->getSize() == 0, "num_heads: got ", num_heads, " heads of ", name, " for ",
                 group->getSize(), " ranks, want a number that the ranks divide: take a group of fewer ranks");
  ATTNPACK_CHECK(dropout == 0, "dropout: got ", dropout,
                 ", which is not done over several processes: each rank would draw the same numbers for other heads; "
                 "set it to 0");
}

// Raises for a parameter of which no share is known: a new part of a module would be shared wrongly.
void check_known(const char* name, const torch::nn::Module& module, const std::unordered_set<std::string>& known) {
  for (const auto& parameter : module.named_parameters()) {
    ATTNPACK_CHECK(known.count(parameter.key().substr(0, parameter.key().find('.'))), name, " has a parameter '",
                   parameter.key(), "', of which tensor_parallel knows no share: leave this module out");
  }
}

template <typename Attention>
void check_grouped(const Attention& module, const Group& group) {
  const auto& o = module.options;
  check_heads("grouped attention", o.num_heads(), o.dropout(), group);
  ATTNPACK_CHECK(
      !o.keys_as_values(),
      "keys_as_values: got a layer with it, of which tensor_parallel knows no share, want one with a v_proj, or "
      "leave the layer whole");
  check_known("grouped attention", module, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sinks"});
  ATTNPACK_CHECK(!(o.qk_norm() && o.qk_norm().all_heads()),
                 "qk_norm: got a norm over all heads, of which a rank has a share, want one over head_dim, or leave "
                 "the layer whole");
}

template <typename Attention>
void share_grouped(Attention& module, Sharing& sharing) {
  auto& o = module.options;
  const auto dim = *o.head_dim(), kv_heads = o.num_kv_heads(), heads = o.num_heads();
  const int64_t ranks = sharing.group()->getSize(), rank = sharing.group()->getRank();
  std::vector<std::vector<int64_t>> read;
  for (int64_t r = 0; r < ranks; ++r)
    read.push_back(kv_heads_of(share_of(heads, ranks, r), heads, kv_heads, o.head_map()).heads);
  const auto share = share_of(heads, ranks, rank);
  const auto own = kv_heads_of(share, heads, kv_heads, o.head_map());

  const auto rows = rows_of_share(heads, dim, sharing.group()), kv_rows = rows_of(read, kv_heads, dim);
  sharing.keep_outputs(module.q_proj, rows);
  sharing.keep_inputs(module.o_proj, rows);
  const bool divides = !o.head_map() && kv_heads % ranks == 0;
  for (auto* layer : {&module.k_proj, &module.v_proj}) {
    sharing.keep_outputs(*layer, kv_rows);
    if (!divides) sum_gradients(*layer, sharing, &kv_rows);
  }
  for (auto* layer : {&module.q_proj, &module.k_proj, &module.v_proj}) sharing.columns(*layer);
  for (auto* norm : {&module.q_norm, &module.k_norm})
    if (*norm) sum_gradient((*norm)->weight, sharing);
  if (o.sinks()) sharing.keep(module, "sinks", module.sinks, 0, rows_of_share(heads, 1, sharing.group()));
  const auto slopes = module.slopes.begin() + share.first;
  module.slopes = std::vector<double>(slopes, slopes + share.count);
  o.num_heads(share.count).num_kv_heads(static_cast<int64_t>(own.heads.size())).head_map(own.map);
}

void share_latent(MultiHeadLatentAttentionImpl& module, Sharing& sharing) {
  auto& o = module.options;
  const auto heads = o.num_heads();
  const auto rows = [&](int64_t size) { return rows_of_share(heads, size / heads, sharing.group()); };
  auto& queries = module.q_proj ? module.q_proj : module.q_b_proj;
  sharing.keep_outputs(queries, rows(queries->options.out_features()));
  if (module.kv_b_proj) sharing.keep_outputs(module.kv_b_proj, rows(module.kv_b_proj->options.out_features()));
  sharing.keep_inputs(module.o_proj, rows(module.o_proj->options.in_features()));
  for (auto* layer : {module.q_proj ? &module.q_proj : &module.q_a_proj, &module.kv_a_proj_with_mqa})
    sharing.columns(*layer);
  sum_gradients(module.kv_a_proj_with_mqa, sharing);
  sum_gradients(module.q_a_proj, sharing);
  for (auto* norm : {&module.q_a_layernorm, &module.kv_a_layernorm})
    if (*norm) sum_gradient((*norm)->weight, sharing);
  const auto& group = sharing.group();
  o.num_heads(share_of(heads, group->getSize(), group->getRank()).count);
}

void share_feed_forward(FeedForwardImpl& module, Sharing& sharing) {
  const auto rows = rows_of_share(module.options.hidden_dim(), 1, sharing.group());
  for (auto* layer : {&module.gate_proj, &module.up_proj}) {
    if (!*layer) continue;
    sharing.keep_outputs(*layer, rows);
    sharing.columns(*layer);
  }
  sharing.keep_inputs(module.down_proj, rows);
  module.options.hidden_dim(sharing.own(rows).numel());
}

}  // namespace

TensorShares tensor_parallel(torch::nn::Module& module, const Group& group) {
  std::vector<std::function<void()>> changes;
  std::unordered_set<const torch::nn::Module*> seen;
  Sharing sharing(group);
  const auto grouped = [&](auto* attention) {
    if (!attention) return;
    check_grouped(*attention, group);
    changes.push_back([&, attention] { share_grouped(*attention, sharing); });
  };
  for (const auto& child : module.modules()) {
    if (!seen.insert(child.get()).second) continue;
    grouped(child->as<GroupedQueryAttentionImpl>());
    grouped(child->as<MultiHeadAttentionImpl>());
    grouped(child->as<MultiQueryAttentionImpl>());
    if (auto* latent = child->as<MultiHeadLatentAttentionImpl>()) {
      check_heads("MultiHeadLatentAttention", latent->options.num_heads(), latent->options.dropout(), group);
      check_known("MultiHeadLatentAttention", *latent,
                  {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
                   "kv_b_proj", "o_proj"});
      changes.push_back([&, latent] { share_latent(*latent, sharing); });
    }
    if (auto* layer = child->as<FeedForwardImpl>()) {
      check_known("FeedForward", *layer, {"gate_proj", "up_proj", "down_proj"});
      changes.push_back([&, layer] { share_feed_forward(*layer, sharing); });
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& change : changes) change();
  for (const auto& child : module.modules()) {
    auto* model = child->as<CausalLMImpl>();
    if (!model || model->options.latent()) continue;
    for (const auto& part : model->modules()) {  // its caches hold this rank's kv heads
      if (const auto* attention = part->as<GroupedQueryAttentionImpl>())
        model->options.num_kv_heads(attention->options.num_kv_heads());
    }
  }
  return sharing.shares_of(module);
}

}  // namespace attnpack::distributed
