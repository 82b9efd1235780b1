#include <attnpack/ops/batched/folded_attention.h>
#include <attnpack/ops/detail/unknown_sizes.h>

namespace attnpack {
namespace {

bool is_batched(const std::optional<Sampled>& x) { return x && x->batched; }

// A mask as [samples or nothing, b, h, l, k], each of these 1 or the full size.
Tensor in_four_dims(const Sampled& mask) {
  Tensor x = mask.tensor;
  const int64_t first = mask.batched ? 1 : 0;
  while (x.dim() < first + 4) x = x.unsqueeze(first);
  return x;
}

Tensor fold_mask(const VmapLevel& level, const Sampled& mask, Fold fold, const c10::SymInt& full, bool gradient) {
  const Tensor x = in_four_dims(mask);
  const int64_t dim = fold == Fold::kBatch ? 0 : 1;  // which the samples join
  if (!mask.batched && !gradient && is_one(x.sym_size(dim))) return x;
  const Tensor sampled = level.with_samples({x, mask.batched});
  auto shape = sampled.sym_sizes().vec();
  shape[dim + 1] = full;
  return fold_samples(sampled.expand_symint(shape), fold);
}

}  // namespace

SampledAttention::SampledAttention(VmapLevel& level, const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionArguments& args)
    : query(level.unwrap(query)),
      key(level.unwrap(key)),
      value(level.unwrap(value)),
      mask(level.unwrap(args.mask)),
      q_offsets(level.unwrap(args.q_offsets)),
      kv_lens(level.unwrap(args.kv_lens)),
      sinks(level.unwrap(args.sinks)),
      alibi_slopes(level.unwrap(args.alibi_slopes)),
      dropout_seed(level.unwrap(args.dropout_seed)),
      key_index(level.unwrap(args.key_index)),
      args(args) {
  this->args.mask = this->args.q_offsets = this->args.kv_lens = this->args.sinks = this->args.alibi_slopes =
      this->args.dropout_seed = this->args.key_index = std::nullopt;
}

Fold SampledAttention::fold(bool gradients, bool sinks_gradient) const {
  const bool of_heads = is_batched(sinks) || is_batched(alibi_slopes) || sinks_gradient;
  const bool of_sequences = is_batched(q_offsets) || is_batched(kv_lens) || is_batched(key_index);
  if (args.dropout_p > 0 || (of_heads && of_sequences)) return Fold::kNone;
  const bool shared_keys = !gradients && !key.batched && !value.batched && !of_sequences && batch() != 1;
  return of_heads || shared_keys ? Fold::kHeads : Fold::kBatch;
}

Tensor fold_samples(const Tensor& x, Fold fold) {
  return fold == Fold::kBatch ? x.flatten(0, 1) : x.transpose(0, 1).flatten(1, 2);
}

Tensor unfold_samples(const Tensor& x, Fold fold, const c10::SymInt& samples) {
  const int64_t dim = fold == Fold::kBatch ? 0 : 1;
  auto shape = x.sym_sizes().vec();
  shape.insert(shape.begin() + dim, samples);
  shape[dim + 1] = samples == 0 ? c10::SymInt(0) : shape[dim + 1] / samples;
  return x.reshape_symint(shape).movedim(dim, 0);
}

FoldedAttention fold_attention(const VmapLevel& level, const SampledAttention& call, Fold fold, bool gradients,
                               bool mask_gradient) {
  FoldedAttention r{.query = {}, .key = {}, .value = {}, .args = call.args};
  const auto folded = [&](const Sampled& x) { return fold_samples(level.with_samples(x), fold); };
  const bool shared_keys = fold == Fold::kHeads && !gradients && !call.key.batched && !call.value.batched;
  r.query = folded(call.query);
  r.key = shared_keys ? call.key.tensor : folded(call.key);
  r.value = shared_keys ? call.value.tensor : folded(call.value);
  if (call.mask)
    r.args.mask =
        fold_mask(level, *call.mask, fold, fold == Fold::kBatch ? call.batch() : call.num_heads(), mask_gradient);
  // Numbers of a sequence repeat along the samples of a batch, numbers of a head along those of the heads.
  const auto repeated = [&](const std::optional<Sampled>& x, Fold along) -> std::optional<Tensor> {
    if (!x) return std::nullopt;
    return fold == along ? level.with_samples(*x).flatten(0, 1) : x->tensor;
  };
  r.args.q_offsets = repeated(call.q_offsets, Fold::kBatch);
  r.args.kv_lens = repeated(call.kv_lens, Fold::kBatch);
  r.args.sinks = repeated(call.sinks, Fold::kHeads);
  r.args.alibi_slopes = repeated(call.alibi_slopes, Fold::kHeads);
  // The kv heads of all samples stand side by side, unless all share them. A key_index for all heads stays one.
  r.args.key_index = repeated(call.key_index, Fold::kBatch);
  if (fold == Fold::kHeads && call.key_index && !shared_keys && !is_one(call.key_index->tensor.sym_size(1)))
    r.args.key_index = folded(*call.key_index);
  if (fold == Fold::kHeads && (shared_keys || call.args.head_map)) {
    const auto number = [](const c10::SymInt& x) { return x.guard_int(__FILE__, __LINE__); };
    const int64_t heads = number(call.num_heads()), kv_heads = number(call.num_kv_heads());
    std::vector<int64_t>& map = r.args.head_map.emplace();
    for (int64_t n = 0; n < number(level.samples()); ++n)
      for (int64_t h = 0; h < heads; ++h)
        map.push_back(kv_head_of(call.args, h, heads, kv_heads) + (shared_keys ? 0 : n * kv_heads));
  }
  return r;
}

Tensor unfold_mask_gradient(const Tensor& gradient, Fold fold, const c10::SymInt& samples, c10::SymIntArrayRef shape) {
  Tensor x = unfold_samples(gradient, fold, samples);  // [samples, b, h, l, k]
  const int64_t dim = fold == Fold::kBatch ? 0 : 1, from_right = 4 - dim;
  const bool broadcast = static_cast<int64_t>(shape.size()) < from_right || shape[shape.size() - from_right] == 1;
  if (broadcast) x = x.sum(dim + 1, /*keepdim=*/true);
  std::vector<c10::SymInt> whole{samples};
  for (const auto& size : shape) whole.push_back(size);
  return x.reshape_symint(whole);
}

}  // namespace attnpack
