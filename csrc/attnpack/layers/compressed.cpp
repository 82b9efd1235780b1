#include <attnpack/layers/compressed.h>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <attnpack/core/padded.h>
#include <attnpack/layers/select_keys.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/merge_states.h>
#include <attnpack/ops/rope.h>

#include <limits>

namespace attnpack {

namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;

constexpr double kNever = -std::numeric_limits<double>::infinity();

// x with its last r dims rotated by cos and sin [rows, r/2].
Tensor rotate_last(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const SymInt rotated = cos.sym_size(1) * 2, plain = x.sym_size(3) - rotated;
  const Tensor last = apply_rope(x.narrow_symint(3, plain, rotated), cos, sin, interleaved);
  return at::cat({x.narrow_symint(3, 0, plain), last}, 3);
}

Tensor rotate_entries(const Tensor& entries, const Tensor& cos, const Tensor& sin, bool interleaved, int64_t rate) {
  const auto rows = [&](const Tensor& table) { return table.slice_symint(0, 0, entries.sym_size(2) * rate, rate); };
  return rotate_last(entries, rows(cos), rows(sin), interleaved);
}

// bool [L, n]: query i sees entry j if the last token of its window is not after i.
Tensor seen_entries(const Tensor& query, const Tensor& entries, int64_t rate) {
  const auto options = at::TensorOptions(at::kLong).device(query.device());
  const Tensor ends = (at::arange(entries.sym_size(2), options) + 1) * rate;
  return ends.unsqueeze(0) <= (at::arange(query.sym_size(2), options) + 1).unsqueeze(1);
}

void check_rotation(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t rate) {
  ATTNPACK_CHECK(x.dim() == 4, "query has shape ", x.sym_sizes(), ", wants [batch, num_heads, length, head_dim]");
  ATTNPACK_CHECK(rate >= 1, "rate is ", rate, ", wants at least 1 token of an entry");
  const bool fits = cos.dim() == 2 && cos.sym_sizes() == sin.sym_sizes() && cos.sym_size(0) == x.sym_size(2) &&
                    cos.sym_size(1) * 2 <= x.sym_size(3);
  ATTNPACK_CHECK(fits, "cos has shape ", cos.sym_sizes(), ", sin ", sin.sym_sizes(), ", want [", x.sym_size(2),
                 ", at most ", x.sym_size(3), " / 2]: one row of angles for each token");
}

void check_entries(const char* name, const Tensor& entries, const Tensor& query, int64_t rate) {
  const bool fits = entries.dim() == 4 && entries.sym_size(0) == query.sym_size(0) && entries.sym_size(1) == 1 &&
                    entries.sym_size(3) == query.sym_size(3) && entries.sym_size(2) * rate <= query.sym_size(2);
  ATTNPACK_CHECK(fits, name, " has shape ", entries.sym_sizes(), ", wants [", query.sym_size(0), ", 1, at most ",
                 query.sym_size(2), " / ", rate, ", ", query.sym_size(3), "] for query ", query.sym_sizes());
}

Tensor compress_tokens_composite(const Tensor& value, const Tensor& gate, const Tensor& bias, bool overlap) {
  ATTNPACK_CHECK(value.dim() == 3 && value.is_floating_point(), "value has shape ", value.sym_sizes(), " and dtype ",
                 value.scalar_type(), ", wants floating numbers [batch, length, width]");
  ATTNPACK_CHECK(gate.sym_sizes() == value.sym_sizes(), "gate has shape ", gate.sym_sizes(), ", wants that of value, ",
                 value.sym_sizes());
  const SymInt width = value.sym_size(2), half = width / 2;
  ATTNPACK_CHECK(bias.dim() == 2 && bias.sym_size(0) >= 1 && bias.sym_size(1) == width, "bias has shape ",
                 bias.sym_sizes(), ", wants [tokens of a window, ", width, "]");
  ATTNPACK_CHECK(!overlap || width % 2 == 0, "value has width ", width, ", wants an even one with overlap");
  const SymInt rate = bias.sym_size(0), windows = value.sym_size(1) / rate;
  const auto by_window = [&](const Tensor& x) {
    return x.narrow_symint(1, 0, windows * rate).unflatten_symint(1, {windows, rate});
  };
  // The first half of the window before, then the second half of the window; before the first window `none`.
  const auto two_windows = [&](const Tensor& x, double none) {
    const Tensor before = at::constant_pad_nd(x.narrow_symint(3, 0, half), {0, 0, 0, 0, 1, 0}, none);
    return at::cat({before.narrow_symint(1, 0, windows), x.narrow_symint(3, half, half)}, 2);
  };
  Tensor tokens = by_window(value), scores = by_window(gate) + bias;
  if (overlap) tokens = two_windows(tokens, 0), scores = two_windows(scores, kNever);
  const Tensor weights = scores.softmax(2, at::toOpMathType(scores.scalar_type()));
  return (tokens * weights.to(tokens.scalar_type())).sum(2);
}

Tensor name_entries_composite(const Tensor& query, const Tensor& entries, const Tensor& weights, int64_t top_k,
                              const Tensor& cos, const Tensor& sin, bool interleaved, int64_t rate) {
  check_rotation(query, cos, sin, rate);
  check_entries("entries", entries, query, rate);
  SelectionPlace place;
  place.mask = seen_entries(query, entries, rate);
  return select_keys(rotate_last(query, cos, sin, interleaved), rotate_entries(entries, cos, sin, interleaved, rate),
                     weights, top_k, place);
}

Tensor attend_entries_composite(const Tensor& query, const Tensor& key, const OptionalTensor& entries,
                                const OptionalTensor& named, const Tensor& sinks, int64_t window,
                                std::optional<double> scale, const Tensor& cos, const Tensor& sin, bool interleaved,
                                int64_t rate) {
  check_rotation(query, cos, sin, rate);
  check_entries("key", key, query, 1);
  ATTNPACK_CHECK(window >= 1, "window is ", window, ", wants at least 1: a token sees itself");
  const Tensor q = rotate_last(query, cos, sin, interleaved), k = rotate_last(key, cos, sin, interleaved);
  auto near = AttentionOptions().causal(true).window({window - 1, 0}).sinks(sinks).scale(scale);
  auto [out, lse] = attention_with_lse(q, k, k, near);
  if (entries && entries->sym_size(2) > 0) {
    check_entries("entries", *entries, query, rate);
    const Tensor far = rotate_entries(*entries, cos, sin, interleaved, rate);
    AttentionOptions options;
    options.scale(scale).mask(seen_entries(query, far, rate));
    if (named) options.key_index(*named);  // with the mask: an indexer whose scores are NaN names any entry
    const auto [far_out, far_lse] = attention_with_lse(q, far, far, options);
    out = std::get<0>(merge_states(out, lse, far_out, far_lse));
  }
  return rotate_last(out, cos, sin.neg(), interleaved).transpose(1, 2).flatten(2);
}

Tensor project_groups_composite(const Tensor& joined, const Tensor& weight, int64_t groups) {
  ATTNPACK_CHECK(groups >= 1 && weight.dim() == 2 && weight.sym_size(0) % groups == 0, "weight has shape ",
                 weight.sym_sizes(), ", wants [groups * rank, width of a group] for ", groups, " groups");
  ATTNPACK_CHECK(joined.dim() == 3 && joined.sym_size(2) == weight.sym_size(1) * groups, "joined has shape ",
                 joined.sym_sizes(), ", wants [batch, length, ", weight.sym_size(1) * groups, "] for ", groups,
                 " groups of weight ", weight.sym_sizes());
  const Tensor by_group = joined.unflatten_symint(2, {SymInt(groups), weight.sym_size(1)});
  const Tensor rows = weight.unflatten_symint(0, {SymInt(groups), weight.sym_size(0) / groups});
  return at::einsum("blgw,grw->blgr", {by_group, rows}).flatten(2);
}

}  // namespace

Tensor compress_tokens(const Tensor& value, const Tensor& gate, const Tensor& bias, bool overlap) {
  static const DispatchedOp<decltype(compress_tokens_composite)> op("attnpack::compress_tokens");
  return op(value, gate, bias, overlap);
}

Tensor name_entries(const Tensor& query, const Tensor& entries, const Tensor& weights, int64_t top_k,
                    const EntryRotation& r) {
  static const DispatchedOp<decltype(name_entries_composite)> op("attnpack::name_entries");
  return op(query, entries, weights, top_k, r.cos, r.sin, r.interleaved, r.rate);
}

Tensor attend_entries(const Tensor& query, const Tensor& key, const OptionalTensor& entries,
                      const OptionalTensor& named, const Tensor& sinks, int64_t window, std::optional<double> scale,
                      const EntryRotation& r) {
  static const DispatchedOp<decltype(attend_entries_composite)> op("attnpack::attend_entries");
  return op(query, key, entries, named, sinks, window, scale, r.cos, r.sin, r.interleaved, r.rate);
}

Tensor project_groups(const Tensor& joined, const Tensor& weight, int64_t groups) {
  static const DispatchedOp<decltype(project_groups_composite)> op("attnpack::project_groups");
  return op(joined, weight, groups);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack;
  m.def("compress_tokens(Tensor value, Tensor gate, Tensor bias, bool overlap) -> Tensor",
        from_schema<compress_tokens_composite>);
  m.def(
      "name_entries(Tensor query, Tensor entries, Tensor weights, int top_k, Tensor cos, Tensor sin, bool interleaved, "
      "int rate) -> Tensor",
      from_schema<name_entries_composite>);
  m.def(
      "attend_entries(Tensor query, Tensor key, Tensor? entries, Tensor? named, Tensor sinks, int window, float? "
      "scale, Tensor cos, Tensor sin, bool interleaved, int rate) -> Tensor",
      from_schema<attend_entries_composite>);
  m.def("project_groups(Tensor joined, Tensor weight, int groups) -> Tensor", from_schema<project_groups_composite>);
}
