#pragma once

#include <attnpack/distributed/shares.h>
#include <attnpack/modules/leaf.h>
#include <attnpack/modules/linear.h>

#include <functional>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace attnpack::distributed {

// The rows of a parameter that each rank holds, of `size`.
struct RankRows {
  int64_t size;
  std::vector<at::Tensor> of;  // of each rank, int64
};

// The rows that the heads of each rank are, of `dim` rows each.
RankRows rows_of(const std::vector<std::vector<int64_t>>& heads, int64_t num_heads, int64_t dim);
// The rows of consecutive heads, hidden numbers or tokens, of `dim` rows each.
RankRows rows_of_share(int64_t size, int64_t dim, const Group& group);

// How the parameters of a module are shared out. Everything is planned first, and done at the end, so that what cannot
// be shared is refused before anything changes.
class ShardGroup {
 public:
  explicit ShardGroup(Group group) : group_(std::move(group)) {}

  const Group& group() const { return group_; }
  int64_t count(const RankRows& rows) const { return local(rows).numel(); }

  // This rank keeps its rows along `dim` of a parameter.
  void keep(ParameterOwner& owner, const std::string& name, const at::Tensor& whole, int64_t dim, RankRows rows);
  // The same for the outputs, or the inputs, of a layer; nothing for one that is not there.
  void keep_outputs(Linear layer, const RankRows& rows);
  void keep_inputs(Linear layer, const RankRows& rows);
  // A layer that reads what all ranks have, for this rank's part.
  void column_parallel(Linear layer);
  void keep_head(Linear layer);
  void keep_table(EmbeddingImpl& table);

  // All ranks hold these parameters, or some rows of them, each for its own heads: a gradient is the sum of theirs.
  void sum_gradients(Linear layer, std::optional<RankRows> rows = std::nullopt);
  void sum_gradient(const at::Tensor& parameter);

  // Does something after the parameters are shared out.
  void then(std::function<void()> change) { changes_.push_back(std::move(change)); }

  // Does all of it to the parts of `module`. A parameter that stands in two places stays one. Raises, before anything
  // changes, where ranks have another share of it in one of them.
  TensorShares apply(torch::nn::Module& module);

 private:
  struct Place {
    ParameterOwner* owner;
    std::string name;
    at::Tensor whole;
    TensorShares::Share share;
  };

  const at::Tensor& local(const RankRows& rows) const { return rows.of[group_->getRank()]; }
  void check_ties(const torch::nn::Module& module) const;
  void hook(const at::Tensor& parameter, const std::optional<RankRows>& rows);

  Group group_;
  bool compares_ = true;  // the first layer of a call compares the ranks' shapes
  std::vector<Place> places_;
  std::vector<std::function<void()>> changes_;
  std::unordered_set<const at::TensorImpl*> hooked_;
};

}  // namespace attnpack::distributed
