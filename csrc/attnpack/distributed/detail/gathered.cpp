#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/pieces.h>

namespace attnpack::distributed {

std::tuple<at::Tensor, at::Tensor> attend_gathered(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, const AttentionOptions& rules,
                                                   const Group& group, Layout layout) {
  const auto whole = unshard_sequence(at::cat({key, value}, -1), group, 2, layout, /*alike=*/false);
  return attend_rows(query, whole.narrow(-1, 0, key.size(-1)), whole.narrow(-1, key.size(-1), value.size(-1)), rules,
                     group, layout);
}

std::tuple<at::Tensor, at::Tensor> attend_rows(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                               const AttentionOptions& rules, const Group& group, Layout layout) {
  std::vector<at::Tensor> outs, lses;
  int64_t row = 0;
  for (const auto& piece : pieces(layout, query.size(2), group->getSize(), group->getRank(), "query")) {
    const auto rows = query.narrow(2, row, piece.stop - piece.start);
    const auto [out, lse] = attend_piece(rows, key, value, rules, piece, {0, key.size(2)});
    outs.push_back(out);
    lses.push_back(lse);
    row += piece.stop - piece.start;
  }
  return {at::cat(outs, 2), at::cat(lses, 2)};
}

}  // namespace attnpack::distributed
