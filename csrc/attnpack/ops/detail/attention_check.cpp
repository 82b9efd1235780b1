#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/core/params.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/extremes.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/unknown_sizes.h>

namespace attnpack {

bool is_element(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

namespace {

void check_per_sequence(const char* name, const std::optional<Tensor>& lengths, const Tensor& query) {
  if (!lengths) return;
  ATTNPACK_CHECK(lengths->dim() == 1 && lengths->sym_size(0) == query.sym_size(0), name, " has shape ",
                 lengths->sym_sizes(), ", wants [batch] = [", query.sym_size(0), "]: one number per sequence");
  ATTNPACK_CHECK(is_int32_or_int64(*lengths), name, " has dtype ", lengths->scalar_type(),
                 ", wants int32 or int64: call .long() on it");
  ATTNPACK_CHECK(lengths->device() == query.device(), name, " is on ", lengths->device(), ", query on ", query.device(),
                 ": move one of them");
}

void check_per_head(const char* name, const std::optional<Tensor>& x, const Tensor& query) {
  if (!x) return;
  ATTNPACK_CHECK(x->dim() == 1 && x->sym_size(0) == query.sym_size(1), name, " has shape ", x->sym_sizes(),
                 ", wants [num_heads] = [", query.sym_size(1), "]: one number per query head");
  ATTNPACK_CHECK(at::isFloatingType(x->scalar_type()), name, " has dtype ", x->scalar_type(), ", wants a float dtype");
  ATTNPACK_CHECK(x->device() == query.device(), name, " is on ", x->device(), ", query on ", query.device(),
                 ": move one of them");
}

void check_mask(const Tensor& mask, const Tensor& query, const c10::SymInt& kv_len) {
  ATTNPACK_CHECK(mask.scalar_type() == at::kBool || is_element(mask.scalar_type()), "mask has dtype ",
                 mask.scalar_type(),
                 ", wants bool (True = may attend), or float64, float32, bfloat16 or float16 (added to the scores): "
                 "call .bool() on it, or .float()");
  ATTNPACK_CHECK(mask.device() == query.device(), "mask is on ", mask.device(), ", query on ", query.device(),
                 ": move one of them");
  const std::array<c10::SymInt, 4> full{query.sym_size(0), query.sym_size(1), query.sym_size(2), kv_len};
  bool fits = mask.dim() <= 4;
  for (int64_t i = 0; fits && i < mask.dim(); ++i) {
    const c10::SymInt size = mask.sym_size(mask.dim() - 1 - i);
    fits = is_one(size) || size == full[3 - i];
  }
  ATTNPACK_CHECK(fits, "mask has shape ", mask.sym_sizes(), ", which does not broadcast to [batch, num_heads, q_len, ",
                 "kv_len] = ", c10::SymIntArrayRef(full.data(), full.size()),
                 "; a padding mask is [batch, 1, 1, kv_len]");
}

void check_key_index(const Tensor& query, const Tensor& key, const AttentionArguments& args) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  ATTNPACK_CHECK(args.key_block >= 1 && args.key_block <= kMost, "key_block is ", args.key_block, ", wants 1 to ",
                 kMost, ", the number of keys of a block");
  ATTNPACK_CHECK(args.key_index || args.key_block == 1, "key_block is ", args.key_block,
                 " without key_index, wants 1: pass the blocks that each row may attend, or leave it out");
  if (!args.key_index) return;
  const Tensor& index = *args.key_index;
  ATTNPACK_CHECK(is_int32_or_int64(index), "key_index has dtype ", index.scalar_type(),
                 ", wants int32 or int64, numbers of keys: call .long() on it, and pass a bool tensor as mask");
  ATTNPACK_CHECK(index.device() == query.device(), "key_index is on ", index.device(), ", query on ", query.device(),
                 ": move one of them");
  ATTNPACK_CHECK(index.dim() == 4 && index.sym_size(0) == query.sym_size(0) &&
                     (is_one(index.sym_size(1)) || index.sym_size(1) == key.sym_size(1)) &&
                     index.sym_size(2) == query.sym_size(2),
                 "key_index has shape ", index.sym_sizes(), ", wants [batch, 1 or num_kv_heads, q_len, n] = [",
                 query.sym_size(0), ", 1 or ", key.sym_size(1), ", ", query.sym_size(2),
                 ", n]: .unsqueeze(1) adds the dimension of the heads, .expand() repeats a row");
}

void check_kv_heads(const Tensor& query, const Tensor& key, const HeadMap& head_map) {
  const c10::SymInt num_heads = query.sym_size(1), num_kv_heads = key.sym_size(1);
  ATTNPACK_CHECK(num_kv_heads > 0 || num_heads == 0, "key has 0 heads, query ", num_heads,
                 ": pass key and value with at least one head for them to read");
  if (!head_map) {
    ATTNPACK_CHECK(num_kv_heads == 0 ? num_heads == 0 : num_heads % num_kv_heads == 0, "query has ", num_heads,
                   " heads, key ", num_kv_heads, ", and ", num_kv_heads, " does not divide ", num_heads,
                   ": pass head_map, the kv head that each query head reads");
    return;
  }
  ATTNPACK_CHECK(static_cast<int64_t>(head_map->size()) == num_heads, "head_map has ", head_map->size(),
                 " entries, wants one for each of the ", num_heads, " query heads");
  for (int64_t kv_head : *head_map)
    ATTNPACK_CHECK(kv_head >= 0 && kv_head < num_kv_heads, "head_map names kv head ", kv_head, ", key has heads 0 to ",
                   num_kv_heads - 1);
}

}  // namespace

void check_dropout(double dropout_p) {
  ATTNPACK_CHECK(dropout_p >= 0 && dropout_p < 1, "dropout_p is ", dropout_p, ", wants 0 <= dropout_p < 1");
}

void check_rule_numbers(const ScoreRules& rules, bool wide) {
  ATTNPACK_CHECK(rules.window[0] >= -1 && rules.window[1] >= -1, "window is (", rules.window[0], ", ", rules.window[1],
                 "), wants numbers >= 0, or -1 for unbounded");
  ATTNPACK_CHECK(!rules.chunk || (*rules.chunk >= 1 && *rules.chunk <= kMostChunk), "chunk is ", *rules.chunk,
                 ", wants how many positions a chunk has, 1 to ", kMostChunk, ", or none");
  ATTNPACK_CHECK(rules.softcap >= 0 && std::isfinite(rules.softcap), "softcap is ", rules.softcap,
                 ", wants a finite number > 0, or 0 for none");
  const double most = greatest_scale(wide);
  ATTNPACK_CHECK(!rules.scale || std::abs(*rules.scale) <= most, "scale is ", *rules.scale,
                 ", wants a finite number from ", -most, " to ", most, wide ? "" : " for queries not in float64",
                 ", or none for 1 / sqrt(head_dim)");
}

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionArguments& args) {
  const auto check_rank = [](const char* name, const Tensor& t) {
    ATTNPACK_CHECK(t.dim() == 4, name, " has shape ", t.sym_sizes(), ", wants 4 dimensions [batch, heads, length, ",
                   "head_dim]: split [batch, length, heads * head_dim] with .unflatten(-1, (heads, ",
                   "head_dim)).transpose(1, 2)");
  };
  check_rank("query", query);
  check_rank("key", key);
  check_rank("value", value);
  const auto dtype = query.scalar_type();
  ATTNPACK_CHECK(is_element(dtype), "query has dtype ", dtype, ", wants float64, float32, bfloat16 or float16");
  const auto check_like_query = [&](const char* name, const Tensor& t) {
    ATTNPACK_CHECK(t.scalar_type() == dtype, name, " has dtype ", t.scalar_type(), ", query ", dtype,
                   ": cast one of them with .to()");
    ATTNPACK_CHECK(t.device() == query.device(), name, " is on ", t.device(), ", query on ", query.device(),
                   ": move one of them with .to()");
    ATTNPACK_CHECK(t.sym_size(0) == query.sym_size(0), name, " has batch ", t.sym_size(0), ", query ",
                   query.sym_size(0), ": expand one of them");
  };
  check_like_query("key", key);
  check_like_query("value", value);
  ATTNPACK_CHECK(key.sym_size(3) == query.sym_size(3), "key has head_dim ", key.sym_size(3), ", query ",
                 query.sym_size(3), ": they must agree (value's may differ)");
  ATTNPACK_CHECK(value.sym_size(1) == key.sym_size(1), "value has ", value.sym_size(1), " heads, key ", key.sym_size(1),
                 ": they must agree");
  ATTNPACK_CHECK(value.sym_size(2) == key.sym_size(2), "value has length ", value.sym_size(2), ", key ",
                 key.sym_size(2), ": they must agree");
  check_kv_heads(query, key, args.head_map);
  if (args.mask) check_mask(*args.mask, query, key.sym_size(2));
  check_key_index(query, key, args);
  check_per_sequence("kv_lens", args.kv_lens, query);  // first: q_offset "end" was made from it
  check_per_sequence("q_offset", args.q_offsets, query);
  check_rule_numbers(args, accumulation_type(dtype) == at::kDouble);
  check_per_head("sinks", args.sinks, query);
  check_per_head("alibi_slopes", args.alibi_slopes, query);
  ATTNPACK_CHECK(!args.alibi_slopes || !args.alibi_slopes->requires_grad(),
                 "alibi_slopes requires a gradient and has none: pass alibi_slopes.detach()");
  check_dropout(args.dropout_p);
  ATTNPACK_CHECK(args.dropout_p == 0 || args.dropout_seed,
                 "dropout_seed is missing: dropout_p > 0 wants an int64 tensor [1]");
  ATTNPACK_CHECK(
      !args.dropout_seed || (args.dropout_seed->sym_numel() == 1 && args.dropout_seed->scalar_type() == at::kLong),
      "dropout_seed has shape ", args.dropout_seed->sym_sizes(), " and dtype ", args.dropout_seed->scalar_type(),
      ", wants one int64");
  ATTNPACK_CHECK(!args.dropout_seed || args.dropout_seed->is_cpu() || args.dropout_seed->device() == query.device(),
                 "dropout_seed is on ", args.dropout_seed->device(), ", wants the CPU or query's device, ",
                 query.device());
}

void check_attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
                              const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                              const AttentionArguments& args, bool mask_gradient, bool sinks_gradient) {
  check_attention(query, key, value, args);
  const auto check_one = [&](const char* name, const Tensor& t, at::ScalarType dtype, c10::SymIntArrayRef shape) {
    ATTNPACK_CHECK(t.sym_sizes() == shape, name, " has shape ", t.sym_sizes(), ", wants ", shape,
                   ": pass what belongs to one call of attention");
    ATTNPACK_CHECK(t.scalar_type() == dtype, name, " has dtype ", t.scalar_type(), ", wants ", dtype, " as query is ",
                   query.scalar_type(), ": cast it with .to()");
    ATTNPACK_CHECK(t.device() == query.device(), name, " is on ", t.device(), ", query on ", query.device(),
                   ": move one of them with .to()");
  };
  const auto dtype = query.scalar_type(), accumulation = accumulation_type(dtype);
  const std::array<c10::SymInt, 4> heads{query.sym_size(0), query.sym_size(1), query.sym_size(2), value.sym_size(3)};
  const c10::SymIntArrayRef shape(heads.data(), heads.size());
  check_one("grad_out", grad_out, dtype, shape);
  check_one("out", out, dtype, shape);
  check_one("lse", lse, accumulation, shape.slice(0, 3));
  if (grad_lse) check_one("grad_lse", *grad_lse, accumulation, shape.slice(0, 3));
  ATTNPACK_CHECK(!mask_gradient || (args.mask && args.mask->scalar_type() != at::kBool),
                 "mask_gradient is true, and mask is none or bool: pass a float mask, or mask_gradient=False");
  ATTNPACK_CHECK(!sinks_gradient || args.sinks,
                 "sinks_gradient is true without sinks: pass them, or sinks_gradient=False");
}

void check_key_index_values(const Tensor& key_index, int64_t key_block, int64_t kv_len) {
  const int64_t blocks = count_blocks(kv_len, key_block);
  const Tensor wrong = ((key_index < -1) | (key_index >= blocks)).nonzero();
  if (wrong.size(0) == 0) return;
  std::vector<int64_t> place(4);
  for (int64_t d = 0; d < 4; ++d) place[d] = wrong[0][d].item<int64_t>();
  const int64_t number = key_index[place[0]][place[1]][place[2]][place[3]].item<int64_t>();
  ATTNPACK_CHECK(false, "key_index", at::IntArrayRef(place), " is ", number, ", wants 0 to ", blocks - 1, ", ",
                 key_block == 1 ? text_of({"the keys of a sequence of ", kv_len})
                                : text_of({"the blocks of ", key_block, " keys in ", kv_len}),
                 ", or -1 for none");
}

void check_kv_lens_values(const int64_t* kv_lens, int64_t batch, int64_t kv_len) {
  for (int64_t b = 0; b < batch; ++b)
    ATTNPACK_CHECK(kv_lens[b] >= 0 && kv_lens[b] <= kv_len, "kv_lens[", b, "] is ", kv_lens[b],
                   ", wants 0 to kv_len = ", kv_len);
}

}  // namespace attnpack
