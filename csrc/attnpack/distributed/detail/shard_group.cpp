#include <attnpack/distributed/detail/shard_group.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/heads.h>
#include <attnpack/distributed/detail/layer_shares.h>
#include <attnpack/ops/stored_linear.h>

#include <utility>

namespace attnpack::distributed {

RankRows rows_of(const std::vector<std::vector<int64_t>>& heads, int64_t num_heads, int64_t dim) {
  RankRows rows{num_heads * dim, {}};
  for (const auto& local : heads)
    rows.of.push_back((at::tensor(local, at::kLong).unsqueeze(1) * dim + at::arange(dim)).flatten());
  return rows;
}

RankRows rows_of_share(int64_t size, int64_t dim, const Group& group) {
  RankRows rows{size * dim, {}};
  for (int64_t rank = 0; rank < group->getSize(); ++rank) {
    const auto share = share_of(size, group->getSize(), rank);
    rows.of.push_back(at::arange(share.first * dim, (share.first + share.count) * dim));
  }
  return rows;
}

void ShardGroup::keep(ParameterOwner& owner, const std::string& name, const at::Tensor& whole, int64_t dim,
                      RankRows rows) {
  ATTNPACK_CHECK(!is_stored(whole), name, ": got stored weights, which tensor parallelism cannot cut: ",
                 "load the model with its weights expanded");
  places_.push_back({&owner, name, whole, {dim, rows.size, std::move(rows.of)}});
}

void ShardGroup::keep_outputs(Linear layer, const RankRows& rows) {
  if (!layer) return;
  keep(*layer, "weight", layer->weight, 0, rows);
  if (layer->bias.defined()) keep(*layer, "bias", layer->bias, 0, rows);
  then([layer, count = count(rows)]() mutable { layer->options.out_features(count); });
}

void ShardGroup::keep_inputs(Linear layer, const RankRows& rows) {
  keep(*layer, "weight", layer->weight, 1, rows);
  then([layer, count = count(rows), share = shared_inputs(group_)]() mutable {
    layer->options.in_features(count);
    layer->share = share;
  });
}

void ShardGroup::column_parallel(Linear layer) {
  if (!layer) return;
  then([layer, share = shared_outputs(group_, std::exchange(compares_, false))]() mutable { layer->share = share; });
}

void ShardGroup::keep_head(Linear layer) {
  const auto vocab_size = layer->options.out_features();
  keep_outputs(layer, rows_of_share(vocab_size, 1, group_));
  then([layer, share = shared_head(group_, vocab_size)]() mutable { layer->share = share; });
}

void ShardGroup::keep_table(EmbeddingImpl& table) {
  const auto vocab_size = table.options.vocab_size();
  const auto rows = rows_of_share(vocab_size, 1, group_);
  keep(table, "weight", table.weight, 0, rows);
  then([&table, count = count(rows), share = shared_table(group_, vocab_size)] {
    table.options.vocab_size(count);
    table.share = share;
  });
  compares_ = false;  // the table does
}

void ShardGroup::sum_gradients(Linear layer, std::optional<RankRows> rows) {
  if (!layer) return;
  then([this, layer, rows = std::move(rows)] {  // of the parameters that the layer has then
    hook(layer->weight, rows);
    hook(layer->bias, rows);
  });
}

void ShardGroup::sum_gradient(const at::Tensor& parameter) {
  then([this, parameter] { hook(parameter, std::nullopt); });
}

void ShardGroup::hook(const at::Tensor& parameter, const std::optional<RankRows>& rows) {
  if (!parameter.defined() || !hooked_.insert(parameter.unsafeGetTensorImpl()).second) return;
  const bool wanted = parameter.requires_grad();
  parameter.set_requires_grad(true);  // a hook needs it, also that of a parameter which is frozen for now
  parameter.register_hook([group = group_, index = rows ? local(*rows) : at::Tensor(),
                           size = rows ? rows->size : 0](const at::Tensor& grad) {
    if (!index.defined()) return all_reduce(grad, group);
    auto sizes = grad.sizes().vec();
    sizes[0] = size;
    const auto here = index.to(grad.device());
    return all_reduce(at::zeros(sizes, grad.options()).index_copy(0, here, grad), group).index_select(0, here);
  });
  parameter.set_requires_grad(wanted);
}

namespace {

bool same(const TensorShares::Share& a, const TensorShares::Share& b) {
  bool equal = a.dim == b.dim && a.size == b.size;
  for (size_t rank = 0; equal && rank < a.rows.size(); ++rank) equal = a.rows[rank].equal(b.rows[rank]);
  return equal;
}

}  // namespace

void ShardGroup::check_ties(const torch::nn::Module& module) const {
  std::unordered_map<const at::TensorImpl*, int64_t> others;  // places of a tensor that are not planned
  std::unordered_set<const torch::nn::Module*> seen;
  for (const auto& child : module.modules()) {
    if (!seen.insert(child.get()).second) continue;
    for (const auto& parameter : child->parameters(/*recurse=*/false)) ++others[parameter.unsafeGetTensorImpl()];
  }
  std::unordered_map<const at::TensorImpl*, const TensorShares::Share*> planned;
  std::unordered_set<const at::TensorImpl*> torn;
  for (const auto& place : places_) {
    const auto* whole = place.whole.unsafeGetTensorImpl();
    --others[whole];
    if (!same(*planned.emplace(whole, &place.share).first->second, place.share)) torn.insert(whole);
  }
  for (const auto& parameter : module.named_parameters()) {
    const auto* whole = parameter.value().unsafeGetTensorImpl();
    ATTNPACK_CHECK(!planned.count(whole) || (!torn.count(whole) && others[whole] == 0), parameter.key(),
                   " is a weight that stands in another place too, of which ranks have another share there: make them "
                   "two weights");
  }
}

TensorShares ShardGroup::apply(torch::nn::Module& module) {
  check_ties(module);
  const at::NoGradGuard no_grad;
  std::unordered_map<const at::TensorImpl*, at::Tensor> parts;  // a weight in two places stays one
  std::unordered_map<const at::TensorImpl*, const TensorShares::Share*> kept;
  for (const auto& [owner, name, whole, share] : places_) {
    auto& part = parts[whole.unsafeGetTensorImpl()];
    if (!part.defined()) {
      const auto& rows = share.rows[group_->getRank()];
      part = whole.detach().index_select(share.dim, rows.to(whole.device())).set_requires_grad(whole.requires_grad());
    }
    owner->assign_parameter(name, part);
    kept.emplace(part.unsafeGetTensorImpl(), &share);
  }
  for (const auto& change : changes_) change();
  std::map<std::string, TensorShares::Share> shares;
  for (const auto& [name, parameter] : state_dict(module)) {
    const auto found = kept.find(parameter.unsafeGetTensorImpl());
    if (found != kept.end()) shares.emplace(name, *found->second);
  }
  return {group_, std::move(shares)};
}

}  // namespace attnpack::distributed
