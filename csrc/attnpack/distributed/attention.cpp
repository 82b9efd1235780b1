#include <attnpack/distributed/attention.h>

#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/distributed/detail/rules.h>

namespace attnpack::distributed {

namespace {

// Lets the operator judge the arguments, with no row to compute.
void judge(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
           const AttentionOptions& options, Layout layout) {
  const at::NoGradGuard no_grad;
  check_defined("key", key);
  check_defined("value", value);
  refuse_unshared(options);
  auto local = options;
  if (query.dim() == 4) pieces(layout, query.size(2), group->getSize(), group->getRank(), "query");
  if (key.dim() == 4) pieces(layout, key.size(2), group->getSize(), group->getRank(), "key");
  if (options.kv_lens() && key.dim() == 4) {
    const auto& lens = *options.kv_lens();
    const auto length = key.size(2) * group->getSize();
    ATTNPACK_CHECK(lens.numel() == 0 || !lens.is_cpu() ||
                       (lens.min().item<int64_t>() >= 0 && lens.max().item<int64_t>() <= length),
                   "kv_lens: got ", lens, ", want values from 0 to ", length,
                   ", the length of the whole sequence: give the valid keys of all ranks together");
    local.kv_lens(lens.clamp(0, key.size(2)));
  }
  attnpack::attention(query.dim() == 4 ? query.narrow(2, 0, 0) : query, key, value, local);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const Group& group,
                                                      const AttentionOptions& options, Layout layout) {
  check_defined("query", query);
  auto said = said_of(options);
  said.insert(said.end(), {{"query", shown(query)},
                           {"key", shown(key)},
                           {"value", shown(value)},
                           {"layout", layout == Layout::kZigzag ? "kZigzag" : "kContiguous"}});
  agree_on("attention", group, query.device(), said, [&] { judge(query, key, value, group, options, layout); });

  const auto whole = unshard_sequence(at::cat({key, value}, -1), group, 2, layout, /*alike=*/false);
  const auto keys = whole.narrow(-1, 0, key.size(-1)), values = whole.narrow(-1, key.size(-1), value.size(-1));
  std::vector<at::Tensor> outs, lses;
  int64_t row = 0;
  for (const auto& piece : pieces(layout, query.size(2), group->getSize(), group->getRank())) {
    const auto rows = query.narrow(2, row, piece.stop - piece.start);
    auto placed = options;
    auto [out, lse] = attnpack::attention_with_lse(rows, keys, values, placed.q_offset(piece.start));
    outs.push_back(out);
    lses.push_back(lse);
    row += piece.stop - piece.start;
  }
  return {at::cat(outs, 2), at::cat(lses, 2)};
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
                     const AttentionOptions& options, Layout layout) {
  return std::get<0>(attention_with_lse(query, key, value, group, options, layout));
}

}  // namespace attnpack::distributed
