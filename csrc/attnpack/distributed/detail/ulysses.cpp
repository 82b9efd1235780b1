#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/heads.h>
#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/sizes.h>

#include <numeric>

namespace attnpack::distributed {

namespace {

using Shape = std::vector<int64_t>;

int64_t numel_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

// Heads of x [B, H, n, D]: a view if they are consecutive, as they are without a head_map.
at::Tensor select(const at::Tensor& x, const std::vector<int64_t>& heads) {
  if (heads.empty()) return x.narrow(1, 0, 0);
  const auto count = static_cast<int64_t>(heads.size());
  if (heads.back() - heads.front() + 1 == count) return x.narrow(1, heads.front(), count);
  return x.index_select(1, at::tensor(heads, at::kLong).to(x.device()));
}

// Sends the tensors in the r-th list to rank r; the tensors that come from rank r have the r-th shapes.
std::vector<std::vector<at::Tensor>> trade(const std::vector<std::vector<at::Tensor>>& tensors,
                                           const std::vector<std::vector<Shape>>& shapes, const Group& group) {
  std::vector<at::Tensor> flat;
  std::vector<int64_t> send, receive, sizes;
  for (const auto& each : tensors) {
    auto& count = send.emplace_back(0);
    for (const auto& x : each) {
      count += count_of(x);
      flat.push_back(x.reshape(-1));
    }
  }
  for (const auto& each : shapes) {
    auto& count = receive.emplace_back(0);
    for (const auto& shape : each) count += sizes.emplace_back(numel_of(shape));
  }
  const auto cut = exchanged(at::cat(flat), receive, send, group).split_with_sizes(sizes);
  std::vector<std::vector<at::Tensor>> got;
  auto next = cut.begin();
  for (const auto& each : shapes) {
    auto& from = got.emplace_back();
    for (const auto& shape : each) from.push_back((next++)->view(shape));
  }
  return got;
}

std::optional<at::Tensor> cut(const std::optional<at::Tensor>& of_heads, const Share& share) {
  return of_heads ? std::optional(of_heads->narrow(0, share.first, share.count)) : std::nullopt;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attend_ulysses(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const AttentionOptions& rules,
                                                  const Group& group, Layout layout) {
  const int64_t ranks = group->getSize(), rank = group->getRank();
  const auto batch = size_of(query, 0), heads = size_of(query, 1), rows = size_of(query, 2);
  std::vector<Share> shares;
  std::vector<ReadHeads> read;
  std::vector<std::vector<at::Tensor>> parts;
  for (int64_t r = 0; r < ranks; ++r) {
    const auto share = shares.emplace_back(share_of(heads, ranks, r));
    const auto& local = read.emplace_back(kv_heads_of(share, heads, size_of(key, 1), rules.head_map())).heads;
    parts.push_back({query.narrow(1, share.first, share.count), select(key, local), select(value, local)});
  }
  const auto kv_heads = static_cast<int64_t>(read[rank].heads.size());
  const std::vector<Shape> wanted{{batch, shares[rank].count, rows, size_of(query, 3)},
                                  {batch, kv_heads, size_of(key, 2), size_of(key, 3)},
                                  {batch, kv_heads, size_of(value, 2), size_of(value, 3)}};
  const auto got = trade(parts, std::vector<std::vector<Shape>>(ranks, wanted), group);
  std::vector<at::Tensor> whole;
  for (size_t i = 0; i < wanted.size(); ++i) {
    std::vector<at::Tensor> each;
    for (const auto& from : got) each.push_back(from[i]);
    whole.push_back(in_order(at::cat(each, 2), 2, layout, ranks));
  }

  auto local = rules;
  local.head_map(read[rank].map).sinks(cut(rules.sinks(), shares[rank]));
  local.alibi_slopes(cut(rules.alibi_slopes(), shares[rank]));
  const auto [out, lse] = attnpack::attention_with_lse(whole[0], whole[1], whole[2], local);
  const auto back = [&, order = rank_order(layout, rows, ranks, query.device())](const at::Tensor& x) {
    const auto dealt = layout == Layout::kContiguous ? x : x.index_select(2, order);
    std::vector<std::vector<at::Tensor>> given;
    for (int64_t r = 0; r < ranks; ++r) given.push_back({dealt.narrow(2, r * rows, rows)});
    std::vector<std::vector<Shape>> shapes;
    for (const auto& share : shares) {
      Shape shape{batch, share.count, rows};
      if (x.dim() == 4) shape.push_back(size_of(x, 3));
      shapes.push_back({shape});
    }
    std::vector<at::Tensor> each;
    for (const auto& from : trade(given, shapes, group)) each.push_back(from[0]);
    return at::cat(each, 1);
  };
  const auto back_out = back(out);
  return {back_out, back(lse)};
}

}  // namespace attnpack::distributed
