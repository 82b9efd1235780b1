#include <attnpack/rope/rotate.h>

#include <ATen/ATen.h>

#include <attnpack/core/padded.h>
#include <attnpack/ops/rope.h>

namespace attnpack {

using at::Tensor;

namespace {

Tensor count(const Tensor& x) {  // 0..L-1
  return at::arange(x.sym_size(2), at::TensorOptions(at::kLong).device(x.device()));
}

struct Table {
  Tensor cos, sin;  // [L, r/2] or [B, 1, L, r/2]
};

Table table_at(const RopeSettings& rope, const Tensor& positions, const std::optional<Tensor>& lengths) {
  auto [cos, sin] = rope.by_length() ? rope_table_by_length(positions, lengths, rope.inv_freq, rope.factor,
                                                            rope.long_inv_freq, rope.growth, rope.trained_len)
                                     : rope_table(positions, rope.inv_freq, rope.factor);
  if (cos.dim() == 3) cos = cos.unsqueeze(1), sin = sin.unsqueeze(1);
  return {cos, sin};
}

Tensor rotate_by(const Tensor& x, const RopeSettings& rope, const Table& table) {
  return apply_rope(x, table.cos, table.sin, rope.interleaved);
}

}  // namespace

void check_positions(const std::optional<Tensor>& positions, const c10::SymInt& batch, const c10::SymInt& length) {
  if (!positions) return;
  const Tensor& p = *positions;
  check_defined("positions", p);
  const bool by_sequence = p.dim() == 2 && (p.sym_size(0) == batch || p.sym_size(0) == 1);
  ATTNPACK_CHECK(p.scalar_type() == at::kLong && (p.dim() == 1 || by_sequence) && p.sym_size(-1) == length,
                 "positions has shape ", p.sym_sizes(), " and dtype ", p.scalar_type(),
                 ", wants int64 [length] or [batch, length] with length ", length, ": one number for each new token");
}

void check_positions(const std::optional<Tensor>& positions, const Tensor& query) {
  if (positions) check_positions(positions, query.sym_size(0), query.sym_size(2));
}

Tensor rotate_at(const Tensor& x, const RopeSettings& rope, const Tensor& positions,
                 const std::optional<Tensor>& lengths) {
  return rotate_by(x, rope, table_at(rope, positions, lengths));
}

std::tuple<Tensor, Tensor> rotate_new(const Tensor& query, const Tensor& key, const RopeSettings& rope,
                                      const Placement& place) {
  check_defined("query", query);
  check_defined("key", key);
  const bool raw = rope.raw_keys && place.past;
  ATTNPACK_CHECK(!raw || !place.positions,
                 "positions: got a tensor with a cache of unrotated keys, which stand where the cache has them; leave "
                 "it out, or set raw_keys of the RotaryEmbedding to false");
  const Tensor where = place.positions ? *place.positions
                       : place.past    ? place.past->unsqueeze(-1) + count(query)
                                       : count(query);
  std::optional<Tensor> lengths;  // of the queries' sequence
  if (rope.by_length() && !place.positions && !place.cross) {
    // A sum of ones is the length also where tracing knows the length only as a symbol.
    lengths = place.new_lens;
    if (place.past) lengths = *place.past + (lengths ? lengths->to(at::kLong) : at::ones_like(count(query)).sum());
  }
  const Table table = table_at(rope, where, lengths);
  const Tensor rotated = rotate_by(query, rope, table);
  if (raw) return {rotated, key};
  if (!place.cross) return {rotated, rotate_by(key, rope, table)};
  return {rotated, rotate_at(key, rope, place.keys_at ? *place.keys_at : count(key), place.new_lens)};
}

Tensor rotate_cached(const Tensor& key, const Tensor& lengths, const RopeSettings& rope,
                     const std::optional<Tensor>& positions) {
  return rope.raw_keys ? rotate_at(key, rope, positions ? *positions : count(key), lengths) : key;
}

}  // namespace attnpack
