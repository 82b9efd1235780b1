#include <attnpack/distributed/detail/pieces.h>

#include <attnpack/distributed/detail/sizes.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>

namespace attnpack::distributed {

namespace {

int64_t length_of(const Piece& piece) { return piece.stop - piece.start; }

std::optional<at::Tensor> lens_of(const AttentionOptions& rules, const Piece& keys) {
  if (!rules.kv_lens()) return std::nullopt;
  return (*rules.kv_lens() - keys.start).clamp(0, length_of(keys));
}

}  // namespace

bool sees(const AttentionOptions& rules, const Piece& rows, const Piece& keys) {
  constexpr int64_t kFar = int64_t{1} << 60;  // sums with it do not overflow
  const auto left = std::min(rules.window()[0], kFar), right = std::min(rules.window()[1], kFar);
  const auto last = rules.causal() ? rows.stop - 1 : right >= 0 ? rows.stop - 1 + right : keys.start;
  const auto first = left >= 0 ? rows.start - left : keys.stop - 1;
  return length_of(rows) > 0 && length_of(keys) > 0 && keys.start <= last && keys.stop - 1 >= first;
}

std::tuple<at::Tensor, at::Tensor> attend_piece(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                const AttentionOptions& rules, const Piece& rows, const Piece& keys) {
  auto placed = rules;
  placed.q_offset(rows.start - keys.start).kv_lens(lens_of(rules, keys));
  return attnpack::attention_with_lse(query, key, value, placed);
}

PieceGradients backward_by_kernel(const RowsBefore& before, const at::Tensor& key, const at::Tensor& value,
                                  const AttentionOptions& rules, const Piece& rows, const Piece& keys) {
  // Given sinks, the kernel knows that out and lse may be of more keys than these. One of -inf has no share of its own.
  const auto none = -std::numeric_limits<double>::infinity();
  AttentionArguments args{rules.rules()};
  args.q_offset = rows.start - keys.start;
  args.kv_lens = lens_of(rules, keys);
  if (!args.sinks) args.sinks = at::full({size_of(before.query, 1)}, none, before.query.options());
  const auto [query_grad, key_grad, value_grad, mask_grad, sinks_grad] =
      attention_backward_op(before.grad_out, before.grad_lse, before.query, key, value, before.out, before.lse, args,
                            /*mask_gradient=*/false, /*sinks_gradient=*/rules.sinks().has_value());
  return {query_grad, key_grad, value_grad, rules.sinks() ? sinks_grad : at::Tensor()};
}

PieceGradients backward_by_join(const RowsBefore& before, const at::Tensor& key, const at::Tensor& value,
                                const AttentionOptions& rules, const Piece& rows, const Piece& keys) {
  const at::AutoGradMode with_grad(true);
  const auto leaf = [](const at::Tensor& x) { return x.detach().requires_grad_(); };
  std::vector<at::Tensor> leaves{leaf(before.query), leaf(key), leaf(value)};
  auto local = rules;
  if (rules.sinks()) local.sinks(leaves.emplace_back(leaf(*rules.sinks())));
  const auto [part, part_lse] = attend_piece(leaves[0], leaves[1], leaves[2], local, rows, keys);
  const auto weight = (part_lse - before.lse).exp().masked_fill(part_lse.isinf(), 0).detach().unsqueeze(-1);
  const auto exact = weight.scalar_type();
  const auto grad_out = before.grad_out.to(exact);
  auto grad_lse = (grad_out * (part.detach().to(exact) - before.out.to(exact))).sum(-1, /*keepdim=*/true);
  if (before.grad_lse) grad_lse = grad_lse + before.grad_lse->unsqueeze(-1);
  const auto found = torch::autograd::grad(
      {part, part_lse}, leaves, {(weight * grad_out).to(part.scalar_type()), (weight * grad_lse).squeeze(-1)});
  return {found[0], found[1], found[2], rules.sinks() ? found[3] : at::Tensor()};
}

}  // namespace attnpack::distributed
