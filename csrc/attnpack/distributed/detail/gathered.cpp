#include <attnpack/distributed/detail/gather_sequence.h>
#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/pieces.h>
#include <attnpack/distributed/detail/sizes.h>

namespace attnpack::distributed {

std::tuple<at::Tensor, at::Tensor> attend_gathered(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, const AttentionOptions& rules,
                                                   const Group& group, Layout layout) {
  const auto whole = gather_sequence(at::cat({key, value}, -1), group, 2, layout, /*alike=*/false);
  const auto dim = size_of(key, -1), v_dim = size_of(value, -1);
  return attend_rows(query, whole.narrow(-1, 0, dim), whole.narrow(-1, dim, v_dim), rules, group, layout);
}

std::tuple<at::Tensor, at::Tensor> attend_rows(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                               const AttentionOptions& rules, const Group& group, Layout layout) {
  std::vector<at::Tensor> outs, lses;
  int64_t row = 0;
  for (const auto& piece : pieces(layout, size_of(query, 2), group->getSize(), group->getRank(), "query")) {
    const auto rows = query.narrow(2, row, piece.stop - piece.start);
    const auto [out, lse] = attend_piece(rows, key, value, rules, piece, {0, size_of(key, 2)});
    outs.push_back(out);
    lses.push_back(lse);
    row += piece.stop - piece.start;
  }
  return {at::cat(outs, 2), at::cat(lses, 2)};
}

}  // namespace attnpack::distributed
