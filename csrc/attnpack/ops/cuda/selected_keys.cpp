#include <attnpack/ops/cuda/selected_keys.h>

#include <ATen/ATen.h>

#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/layout.h>

namespace attnpack {
namespace {

// The most bytes of keys and values that are copied at a time, unless one row of each sequence has more.
constexpr int64_t kCopiedBytes = 64 << 20;

// Rows [begin, end) of the sequences, as the batch [batch * rows] of a call.
class SelectedRows {
 public:
  SelectedRows(const Tensor& query, const Tensor& key, const AttentionArguments& args, Range rows)
      : query_(query), args_(args), rows_(rows), kv_len_(key.size(2)) {
    const Tensor index = rows_of_piece(*args.key_index);
    const Tensor in_block = at::arange(args.key_block, index.options().dtype(at::kLong));
    const Tensor blocks = index.to(at::kLong).unsqueeze(-1), last = blocks.new_full({}, kv_len_);
    keys_ = at::where((blocks >= 0) & (blocks < count_blocks(kv_len_, args.key_block)),
                      blocks * args.key_block + in_block, last)
                .flatten(-2);  // [B, heads, rows, names * key_block]
    const Tensor position = rows_of_piece(row_positions(query, args));
    if (const auto allowed = allowed_by_range(position, keys_, args)) keys_ = at::where(*allowed, keys_, last);
    // In rising order, each once. Keys that are not allowed come last, as the key after all others.
    keys_ = std::get<0>(keys_.clamp_max(kv_len_).sort(-1));
    const Tensor again = at::constant_pad_nd(keys_.slice(-1, 1) == keys_.slice(-1, 0, -1), {1, 0}, 0);
    keys_ = keys_.masked_fill(again, kv_len_);
    selected_ = keys_ < kv_len_;
    keys_ = keys_.clamp_max(kv_len_ - 1);
    position_ = position;
  }

  // x [B, heads, Lq, width] as [B * rows, heads, 1, width].
  Tensor as_batch(const Tensor& x) const { return rows_of_piece(x).transpose(1, 2).flatten(0, 1).unsqueeze(2); }
  // The reverse, for only the rows of this piece: [B, heads, rows, width].
  Tensor as_rows(const Tensor& x) const {
    return x.squeeze(2).unflatten(0, {query_.size(0), rows_.end - rows_.begin}).transpose(1, 2);
  }

  // The selected rows of x, keys or values [B, Hkv, Lkv, width], as [B * rows, Hkv, keys, width]. Only these
  // rows are copied, also from a cache or a projection, whose heads do not lie one after the other.
  Tensor gathered(const Tensor& x) const {
    const Tensor batch = at::arange(x.size(0), keys_.options()).view({-1, 1, 1, 1});
    const Tensor head = at::arange(x.size(1), keys_.options()).view({-1, 1});
    return x.index({batch, head, keys_.transpose(1, 2)}).flatten(0, 1);
  }
  // sum [B, Hkv, Lkv, width] += the gradients of gathered keys.
  void add_gradients(const Tensor& sum, const Tensor& gradients) const {
    sum.view({-1, sum.size(3)}).index_put_({places(sum)}, gradients.flatten(0, 2).to(sum.scalar_type()), true);
  }

  // The arguments of the call. Its mask says which of the gathered keys count, and holds what depends on their places.
  AttentionArguments arguments(int64_t num_heads, at::ScalarType accumulation) const {
    AttentionArguments r{args_.without_ranges()};
    r.alibi_slopes = std::nullopt;
    Tensor mask = of_heads(selected_, num_heads);
    std::optional<Tensor> added;
    if (args_.alibi_slopes)
      added = args_.alibi_slopes->detach().to(accumulation).view({1, -1, 1, 1}) *
              (position_ - of_heads(keys_, num_heads)).abs().neg().to(accumulation);
    if (args_.mask) {
      const Tensor given = mask_at_keys(*args_.mask, num_heads);
      if (given.scalar_type() == at::kBool)
        mask = mask & given;
      else
        added = added ? *added + given.to(accumulation) : given.to(accumulation);
    }
    if (added) mask = added->masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity());
    r.mask = mask.transpose(1, 2).flatten(0, 1).unsqueeze(2);
    return r;
  }

  // sum [B, Hq, Lq, Lkv] += the gradient of the call's mask.
  void add_mask_gradient(const Tensor& sum, const Tensor& gradient) const {
    const Tensor terms = as_rows(gradient).masked_fill(of_heads(selected_, sum.size(1)).logical_not(), 0);
    rows_of_piece(sum).scatter_add_(-1, of_heads(keys_, sum.size(1)).expand_as(terms), terms);
  }

 private:
  Tensor rows_of_piece(const Tensor& x) const {
    return x.size(-2) == query_.size(2) ? x.narrow(-2, rows_.begin, rows_.end - rows_.begin) : x;
  }
  // x [B, Hkv, ...] for the query heads; x itself if all share it.
  Tensor of_heads(const Tensor& x, int64_t num_heads) const {
    if (x.size(1) == 1) return x;
    std::vector<int64_t> map(num_heads);
    for (int64_t h = 0; h < num_heads; ++h) map[h] = kv_head_of(args_, h, num_heads, x.size(1));
    return x.index_select(1, at::tensor(map, at::kLong).to(query_.device()));
  }
  Tensor mask_at_keys(const Tensor& mask, int64_t num_heads) const {
    const Tensor whole = rows_of_piece(mask.expand({query_.size(0), num_heads, query_.size(2), kv_len_}));
    return whole.gather(-1, of_heads(keys_, num_heads).expand({-1, num_heads, -1, -1}));
  }
  // Where the keys stand in x [B * Hkv * Lkv, width], in the order [B, rows, Hkv, keys].
  Tensor places(const Tensor& x) const {
    const Tensor head = at::arange(x.size(0) * x.size(1), keys_.options()).view({x.size(0), x.size(1), 1, 1}) * kv_len_;
    return (head + keys_).transpose(1, 2).flatten();
  }

  const Tensor query_;
  const AttentionArguments& args_;
  Range rows_;
  int64_t kv_len_;
  Tensor keys_, selected_;  // [B, 1 or Hkv, rows, keys]: their numbers, and whether they count
  Tensor position_;
};

// Calls f with pieces of the rows.
template <class F>
void for_each_piece(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionArguments& args,
                    const F& f) {
  const int64_t keys = args.key_index->size(3) * args.key_block, q_len = query.size(2);
  const int64_t bytes = key.size(0) * key.size(1) * keys * (key.size(3) + value.size(3)) * key.element_size();
  const int64_t step = std::max<int64_t>(kCopiedBytes / std::max<int64_t>(bytes, 1), 1);
  for (int64_t begin = 0; begin < q_len; begin += step) f(Range{begin, std::min(begin + step, q_len)});
}

// Without keys or heads there is nothing to gather.
bool takes_formula(const Tensor& query, const Tensor& key, const AttentionArguments& args) {
  return args.dropout_p > 0 || query.numel() == 0 || key.numel() == 0 || args.key_index->numel() == 0;
}

}  // namespace

AttentionResult attend_selected_keys_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const AttentionArguments& args) {
  if (checks_numbers()) check_key_index_values(*args.key_index, args.key_block, key.size(2));
  if (takes_formula(query, key, args)) return attention_formula(query, key, value, args);
  const auto accumulation = accumulation_type(query.scalar_type());
  const Tensor out =
      empty_laid_as(query, {query.size(0), query.size(1), query.size(2), value.size(3)}, query.options());
  const Tensor lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(accumulation));
  for_each_piece(query, key, value, args, [&](Range rows) {
    const SelectedRows selected(query, key, args, rows);
    const auto [o, l] = attention_cuda(selected.as_batch(query), selected.gathered(key), selected.gathered(value),
                                       selected.arguments(query.size(1), accumulation));
    out.slice(2, rows.begin, rows.end).copy_(selected.as_rows(o));
    lse.slice(2, rows.begin, rows.end).copy_(selected.as_rows(l.unsqueeze(-1)).squeeze(-1));
  });
  return {out, lse};
}

AttentionGradients differentiate_selected_keys_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                                    const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const Tensor& out, const Tensor& lse,
                                                    const AttentionArguments& args, bool mask_gradient,
                                                    bool sinks_gradient) {
  if (takes_formula(query, key, args))
    return attention_backward_formula(grad_out, grad_lse, query, key, value, args, mask_gradient, sinks_gradient);
  const auto accumulation = accumulation_type(query.scalar_type());
  const auto sums = [&](const Tensor& x) { return at::zeros(x.sizes(), x.options().dtype(accumulation)); };
  const Tensor grad_query = empty_laid_as(query), grad_keys = sums(key), grad_values = sums(value);
  Tensor grad_mask = at::empty({0}, query.options()), grad_sinks = at::empty({0}, query.options());
  if (mask_gradient)
    grad_mask = at::zeros({query.size(0), query.size(1), query.size(2), key.size(2)}, grad_keys.options());
  if (sinks_gradient) grad_sinks = sums(*args.sinks);
  for_each_piece(query, key, value, args, [&](Range rows) {
    const SelectedRows selected(query, key, args, rows);
    const auto per_row = [&](const Tensor& x) { return selected.as_batch(x.unsqueeze(-1)).squeeze(-1); };
    const auto [q, k, v, m, s] = attention_backward_cuda(
        selected.as_batch(grad_out), grad_lse ? std::make_optional(per_row(*grad_lse)) : std::nullopt,
        selected.as_batch(query), selected.gathered(key), selected.gathered(value), selected.as_batch(out),
        per_row(lse), selected.arguments(query.size(1), accumulation), mask_gradient, sinks_gradient);
    grad_query.slice(2, rows.begin, rows.end).copy_(selected.as_rows(q));
    selected.add_gradients(grad_keys, k);
    selected.add_gradients(grad_values, v);
    if (mask_gradient) selected.add_mask_gradient(grad_mask, m);
    if (sinks_gradient) grad_sinks.add_(s);
  });
  if (mask_gradient) grad_mask = grad_mask.sum_to_size(args.mask->sizes()).to(args.mask->scalar_type());
  if (sinks_gradient) grad_sinks = grad_sinks.to(args.sinks->scalar_type());
  return {grad_query, empty_laid_as(key).copy_(grad_keys), empty_laid_as(value).copy_(grad_values), grad_mask,
          grad_sinks};
}

}  // namespace attnpack
