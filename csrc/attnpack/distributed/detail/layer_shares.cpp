#include <attnpack/distributed/detail/layer_shares.h>

#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/heads.h>
#include <attnpack/distributed/detail/rules.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/ops/linear.h>

#include <utility>

namespace attnpack::distributed {

namespace {

std::optional<at::Tensor> given(const at::Tensor& bias) { return bias.defined() ? std::optional(bias) : std::nullopt; }

class SharedOutputs : public LinearShare {
 public:
  SharedOutputs(Group group, bool compares) : group_(std::move(group)), compares_(compares) {}
  at::Tensor enter(const at::Tensor& x) const override {
    if (compares_) agree("a module", group_, x.device(), {{"x", shown(x)}});
    return copied(x, group_);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const override {
    return linear(enter(x), weight, given(bias));
  }

 private:
  Group group_;
  bool compares_;
};

class SharedInputs : public LinearShare {
 public:
  explicit SharedInputs(Group group) : group_(std::move(group)) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const override {
    const auto out = summed(linear(x, weight), group_);
    return bias.defined() ? out + bias : out;
  }

 private:
  Group group_;
};

class SharedHead : public LinearShare {
 public:
  SharedHead(Group group, int64_t vocab_size) : group_(std::move(group)), vocab_size_(vocab_size) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const override {
    return joined(linear(copied(x, group_), weight, given(bias)));
  }

 private:
  // The logits [..., n] of all ranks as [..., vocab_size]. Shares may differ by one, so each is padded to the longest.
  at::Tensor joined(const at::Tensor& local) const {
    const int64_t ranks = group_->getSize(), longest = (vocab_size_ + ranks - 1) / ranks;
    const auto padded = at::constant_pad_nd(local, {0, longest - local.size(-1)});
    auto parts = gathered(padded.unsqueeze(0), group_, /*alike=*/true).unbind(0);
    for (int64_t rank = 0; rank < ranks; ++rank)
      parts[rank] = parts[rank].narrow(-1, 0, share_of(vocab_size_, ranks, rank).count);
    return at::cat(parts, -1);
  }

  Group group_;
  int64_t vocab_size_;
};

class SharedTable : public EmbeddingShare {
 public:
  SharedTable(const Group& group, int64_t vocab_size)
      : group_(group), vocab_size_(vocab_size), head_(group, vocab_size) {}

  at::Tensor look_up(const char* name, const at::Tensor& ids, const at::Tensor& local) const override {
    check(name, ids, local);
    const auto share = share_of(vocab_size_, group_->getSize(), group_->getRank());
    const auto foreign = (ids < share.first).logical_or(ids >= share.first + share.count);
    // A rank without rows looks up one of zeros, so that its backward runs as that of the others.
    const auto rows = share.count ? local : at::cat({local, local.new_zeros({1, local.size(1)})});
    const auto found = at::embedding(rows, (ids - share.first).masked_fill(foreign, 0));
    return summed(found.masked_fill(foreign.unsqueeze(-1), 0), group_);
  }

  at::Tensor logits(const at::Tensor& x, const at::Tensor& local) const override { return head_.forward(x, local, {}); }

  at::Tensor agreed(const at::Tensor& tokens) const override { return from_first(tokens, group_); }

 private:
  void check(const char* name, const at::Tensor& ids, const at::Tensor& local) const {
    const bool wants = local.requires_grad() && at::GradMode::is_enabled();
    agree_on("a model", group_, ids.device(), {{name, shown(ids)}, {"gradients", wants ? "wanted" : "not wanted"}},
             [&] {
               if (ids.is_cpu()) check_vocabulary(name, ids, vocab_size_);
             });
    if (!ids.is_cpu()) at::_assert_async((ids >= 0).logical_and(ids < vocab_size_).all(), "ids outside the vocabulary");
  }

  Group group_;
  int64_t vocab_size_;
  SharedHead head_;
};

}  // namespace

std::shared_ptr<const LinearShare> shared_outputs(const Group& group, bool compares) {
  return std::make_shared<SharedOutputs>(group, compares);
}

std::shared_ptr<const LinearShare> shared_inputs(const Group& group) { return std::make_shared<SharedInputs>(group); }

std::shared_ptr<const LinearShare> shared_head(const Group& group, int64_t vocab_size) {
  return std::make_shared<SharedHead>(group, vocab_size);
}

std::shared_ptr<const EmbeddingShare> shared_table(const Group& group, int64_t vocab_size) {
  return std::make_shared<SharedTable>(group, vocab_size);
}

}  // namespace attnpack::distributed
