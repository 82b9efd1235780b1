#include <attnpack/distributed/shares.h>

#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/rules.h>

#include <algorithm>

namespace attnpack::distributed {

namespace {

using Share = TensorShares::Share;

// Raises unless the tensor has `size` rows along the share's dim.
void check_rows(const std::string& name, const at::Tensor& x, const Share& share, int64_t size, const char* of) {
  check_defined(name.c_str(), x);
  ATTNPACK_CHECK(x.dim() > share.dim && x.size(share.dim) == size, "state dict: got ", name, " of shape ", x.sizes(),
                 ", want ", size, " along dim ", share.dim, ", the length of ", of);
}

// One parameter, from the parts of all ranks. These may have different lengths, so each is padded to the longest.
at::Tensor joined(const at::Tensor& part, const Share& share, const Group& group) {
  int64_t longest = 0;
  for (const auto& rows : share.rows) longest = std::max(longest, rows.numel());
  const auto local = part.detach().movedim(share.dim, 0);
  auto sizes = local.sizes().vec();
  sizes[0] = longest;
  const auto padded = at::zeros(sizes, local.options());
  padded.narrow(0, 0, local.size(0)).copy_(local);
  const auto parts = all_gather(padded, group);
  sizes[0] = share.size;
  const auto whole = at::empty(sizes, local.options());
  for (size_t rank = 0; rank < share.rows.size(); ++rank) {
    const auto& rows = share.rows[rank];
    whole.index_copy_(0, rows.to(whole.device()), parts.narrow(0, static_cast<int64_t>(rank) * longest, rows.numel()));
  }
  return whole.movedim(0, share.dim).contiguous();
}

}  // namespace

StateDict TensorShares::part_of(const StateDict& whole) const {
  StateDict part;
  for (const auto& [name, tensor] : whole) {
    const auto found = shares_.find(name);
    if (found == shares_.end()) {
      part[name] = tensor;
      continue;
    }
    const auto& share = found->second;
    check_rows(name, tensor, share, share.size, "the parameter of one process: give part_of a whole checkpoint");
    part[name] = tensor.detach().index_select(share.dim, share.rows[group_->getRank()].to(tensor.device()));
  }
  return part;
}

StateDict TensorShares::whole_of(const StateDict& part) const {
  std::vector<std::pair<std::string, std::string>> texts;
  std::map<const at::TensorImpl*, std::string> names;  // a weight in two places travels once
  at::Device device(at::kCPU);
  for (const auto& [name, tensor] : part) {
    const auto found = shares_.find(name);
    if (found == shares_.end() || !tensor.defined()) continue;
    device = tensor.device();
    auto sizes = tensor.sizes().vec();
    if (static_cast<int64_t>(sizes.size()) > found->second.dim) sizes[found->second.dim] = found->second.size;
    const auto [first, is_new] = names.emplace(tensor.unsafeGetTensorImpl(), name);
    texts.emplace_back(name, text_of({c10::getDtypeNames(tensor.scalar_type()).first, " ", at::IntArrayRef(sizes),
                                      is_new ? "" : ", the tensor of " + first->second}));
  }
  agree_on("a state dict", group_, device, texts, [&] {
    for (const auto& [name, tensor] : part) {
      const auto found = shares_.find(name);
      if (found == shares_.end()) continue;
      const auto& rows = found->second.rows[group_->getRank()];
      check_rows(name, tensor, found->second, rows.numel(), "this rank's part: give whole_of what state_dict gives");
    }
  });
  StateDict whole;
  for (const auto& [name, tensor] : part) {
    const auto found = shares_.find(name);
    if (found == shares_.end()) {
      whole[name] = tensor;
      continue;
    }
    const auto& first = names.at(tensor.unsafeGetTensorImpl());
    whole[name] = first == name ? joined(tensor, found->second, group_) : whole.at(first);
  }
  return whole;
}

}  // namespace attnpack::distributed
