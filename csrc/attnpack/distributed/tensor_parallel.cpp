#include <attnpack/distributed/tensor_parallel.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/agreement.h>
#include <attnpack/layers/alibi.h>
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/grouped_attention.h>
#include <attnpack/modules/latent_attention.h>

#include <algorithm>
#include <functional>
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

// Shares the outputs of layers of one module.
class ColumnShares {
 public:
  explicit ColumnShares(Group group) : group_(std::move(group)) {}
  void share(Linear& layer) { layer->share = std::make_shared<Columns>(group_, std::exchange(first_, false)); }

 private:
  Group group_;
  bool first_ = true;
};

// The part of `size` heads or hidden numbers that this rank has: consecutive ones, as equal in number as can be.
struct Share {
  int64_t first, count;
};

Share share_of(int64_t size, const Group& group) {
  const int64_t ranks = group->getSize(), rank = group->getRank(), first = rank * size / ranks;
  return {first, (rank + 1) * size / ranks - first};
}

// The rows that `heads` of `dim` rows each are.
at::Tensor rows_of(const std::vector<int64_t>& heads, int64_t dim) {
  return (at::tensor(heads, at::kLong).unsqueeze(1) * dim + at::arange(dim)).flatten();
}

std::vector<int64_t> numbers_of(const Share& share) {
  std::vector<int64_t> numbers(share.count);
  for (int64_t i = 0; i < share.count; ++i) numbers[i] = share.first + i;
  return numbers;
}

// Puts a parameter's rows along `dim` in its place.
void keep(ParameterOwner& owner, const std::string& name, const at::Tensor& whole, int64_t dim,
          const at::Tensor& rows) {
  const bool wanted = whole.requires_grad();
  owner.assign_parameter(name, whole.detach().index_select(dim, rows.to(whole.device())).set_requires_grad(wanted));
}

void keep_outputs(Linear& layer, const at::Tensor& rows) {
  keep(*layer, "weight", layer->weight, 0, rows);
  if (layer->bias.defined()) keep(*layer, "bias", layer->bias, 0, rows);
  layer->options.out_features(rows.numel());
}

void keep_inputs(Linear& layer, const at::Tensor& rows, const Group& group) {
  keep(*layer, "weight", layer->weight, 1, rows);
  layer->options.in_features(rows.numel());
  layer->share = std::make_shared<Rows>(group);
}

// The gradient of a parameter that all ranks hold, each for its own heads, is the sum of theirs. `rows` are those that
// this rank holds of `size`; undefined for all.
void sum_gradient(const at::Tensor& parameter, const Group& group, const at::Tensor& rows = {}, int64_t size = 0) {
  if (!parameter.defined()) return;
  const bool wanted = parameter.requires_grad();
  parameter.set_requires_grad(true);  // a hook needs it, also that of a parameter which is frozen for now
  parameter.register_hook([group, rows, size](const at::Tensor& grad) {
    if (!rows.defined()) return all_reduce(grad, group);
    auto sizes = grad.sizes().vec();
    sizes[0] = size;
    const auto index = rows.to(grad.device());
    return all_reduce(at::zeros(sizes, grad.options()).index_copy(0, index, grad), group).index_select(0, index);
  });
  parameter.set_requires_grad(wanted);
}

void sum_gradients(const Linear& layer, const Group& group, const at::Tensor& rows = {}, int64_t size = 0) {
  if (!layer) return;
  sum_gradient(layer->weight, group, rows, size);
  sum_gradient(layer->bias, group, rows, size);
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
void share_grouped(Attention& module, const Group& group, ColumnShares& columns) {
  auto& o = module.options;
  const auto dim = *o.head_dim(), kv_heads = o.num_kv_heads(), heads = o.num_heads();
  const auto share = share_of(heads, group);
  std::vector<int64_t> map, read;  // the kv head of each query head of this rank; these once, in order
  for (int64_t head = share.first; head < share.first + share.count; ++head)
    map.push_back(o.head_map() ? (*o.head_map())[head] : head / (heads / kv_heads));
  read = map;
  std::sort(read.begin(), read.end());
  read.erase(std::unique(read.begin(), read.end()), read.end());
  for (auto& head : map) head = std::lower_bound(read.begin(), read.end(), head) - read.begin();

  const auto rows = rows_of(numbers_of(share), dim), kv_rows = rows_of(read, dim);
  keep_outputs(module.q_proj, rows);
  keep_inputs(module.o_proj, rows, group);
  const bool divides = !o.head_map() && kv_heads % group->getSize() == 0;
  for (auto* layer : {&module.k_proj, &module.v_proj}) {
    keep_outputs(*layer, kv_rows);
    if (!divides) sum_gradients(*layer, group, kv_rows, kv_heads * dim);
  }
  for (auto* layer : {&module.q_proj, &module.k_proj, &module.v_proj}) columns.share(*layer);
  for (auto* norm : {&module.q_norm, &module.k_norm})
    if (*norm) sum_gradient((*norm)->weight, group);
  if (o.sinks()) keep(module, "sinks", module.sinks, 0, rows_of(numbers_of(share), 1));
  const auto slopes = module.slopes.begin() + share.first;
  module.slopes = std::vector<double>(slopes, slopes + share.count);
  const bool even = map.size() % read.size() == 0 && std::is_sorted(map.begin(), map.end()) &&
                    std::all_of(map.begin(), map.end(), [&, i = int64_t{0}](int64_t head) mutable {
                      return head == i++ / static_cast<int64_t>(map.size() / read.size());
                    });
  o.num_heads(share.count).num_kv_heads(static_cast<int64_t>(read.size()));
  o.head_map(even ? std::nullopt : std::optional(map));
}

void share_latent(MultiHeadLatentAttentionImpl& module, const Group& group, ColumnShares& columns) {
  auto& o = module.options;
  const auto heads = o.num_heads();
  const auto share = share_of(heads, group);
  const auto rows = [&](int64_t size) { return rows_of(numbers_of(share), size / heads); };
  auto& queries = module.q_proj ? module.q_proj : module.q_b_proj;
  keep_outputs(queries, rows(queries->options.out_features()));
  if (module.kv_b_proj) keep_outputs(module.kv_b_proj, rows(module.kv_b_proj->options.out_features()));
  keep_inputs(module.o_proj, rows(module.o_proj->options.in_features()), group);
  for (auto* layer : {module.q_proj ? &module.q_proj : &module.q_a_proj, &module.kv_a_proj_with_mqa})
    columns.share(*layer);
  sum_gradients(module.kv_a_proj_with_mqa, group);
  sum_gradients(module.q_a_proj, group);
  for (auto* norm : {&module.q_a_layernorm, &module.kv_a_layernorm})
    if (*norm) sum_gradient((*norm)->weight, group);
  o.num_heads(share.count);
}

void share_feed_forward(FeedForwardImpl& module, const Group& group, ColumnShares& columns) {
  const auto share = share_of(module.options.hidden_dim(), group);
  const auto rows = at::arange(share.first, share.first + share.count);
  for (auto* layer : {&module.gate_proj, &module.up_proj}) {
    if (!*layer) continue;
    keep_outputs(*layer, rows);
    columns.share(*layer);
  }
  keep_inputs(module.down_proj, rows, group);
  module.options.hidden_dim(share.count);
}

}  // namespace

void tensor_parallel(torch::nn::Module& module, const Group& group) {
  std::vector<std::function<void()>> changes;
  std::unordered_set<const torch::nn::Module*> seen;
  ColumnShares columns(group);
  const auto grouped = [&](auto* attention) {
    if (!attention) return;
    check_grouped(*attention, group);
    changes.push_back([&, attention] { share_grouped(*attention, group, columns); });
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
      changes.push_back([&, latent] { share_latent(*latent, group, columns); });
    }
    if (auto* layer = child->as<FeedForwardImpl>()) {
      check_known("FeedForward", *layer, {"gate_proj", "up_proj", "down_proj"});
      changes.push_back([&, layer] { share_feed_forward(*layer, group, columns); });
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
}

}  // namespace attnpack::distributed
