#include <torch/library.h>

#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/detail/rope_args.h>
#include <attnpack/ops/rope.h>

namespace attnpack {
namespace {

Tensor apply_rope_batched(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_rope(x, cos, sin);
  VmapLevel level;
  const Sampled from = level.unwrap(x), c = level.unwrap(cos), s = level.unwrap(sin);
  if (level.is_foreign()) return apply_rope(x, cos, sin, interleaved);
  // The samples stand before all dims of x, and the tables broadcast from the right.
  const auto table = [&](const Sampled& t) {
    if (!c.batched && !s.batched) return t.tensor;
    Tensor aligned = level.with_samples(t);
    while (aligned.dim() <= x.dim()) aligned = aligned.unsqueeze(1);
    return aligned;
  };
  return level.wrap(apply_rope(level.with_samples(from), table(c), table(s), interleaved));
}

std::tuple<Tensor, Tensor> rope_table_batched(const Tensor& positions, at::ArrayRef<double> inv_freq, double factor) {
  VmapLevel level;
  const Sampled where = level.unwrap(positions);
  if (level.is_foreign()) return rope_table(positions, inv_freq, factor);
  const auto [cos, sin] = rope_table(where.tensor, inv_freq, factor);
  return {level.wrap(cos), level.wrap(sin)};
}

// The samples join the rows, because each row has a length of its own.
std::tuple<Tensor, Tensor> rope_table_by_length_batched(const Tensor& positions, const std::optional<Tensor>& lengths,
                                                        at::ArrayRef<double> inv_freq, double factor,
                                                        at::ArrayRef<double> long_inv_freq, double growth,
                                                        int64_t trained_len) {
  check_rope_by_length(positions, lengths, inv_freq, long_inv_freq, trained_len);
  const auto shape = rope_table_shape(positions, lengths, inv_freq);
  VmapLevel level;
  const Sampled where = level.unwrap(positions);
  const std::optional<Sampled> seen = level.unwrap(lengths);
  if (level.is_foreign())
    return rope_table_by_length(positions, lengths, inv_freq, factor, long_inv_freq, growth, trained_len);
  const c10::SymInt rows = shape.size() == 3 ? shape[0] : c10::SymInt(1), length = shape[shape.size() - 2];
  Tensor all = level.with_samples(where);
  if (positions.dim() == 1) all = all.unsqueeze(1);
  all = all.expand_symint({level.samples(), rows, length}).flatten(0, 1);
  std::optional<Tensor> each;
  if (seen) each = level.with_samples(*seen).expand_symint({level.samples(), rows}).flatten();
  const auto [cos, sin] = rope_table_by_length(all, each, inv_freq, factor, long_inv_freq, growth, trained_len);
  std::vector<c10::SymInt> whole{level.samples()};
  for (const auto& size : shape) whole.push_back(size);
  return {level.wrap(cos.reshape_symint(whole)), level.wrap(sin.reshape_symint(whole))};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) {
  m.impl("apply_rope", attnpack::apply_rope_batched);
  m.impl("rope_table", attnpack::rope_table_batched);
  m.impl("rope_table_by_length", attnpack::rope_table_by_length_batched);
}
