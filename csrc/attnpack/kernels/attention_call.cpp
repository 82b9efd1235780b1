#include <attnpack/kernels/attention_call.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include <attnpack/core/extremes.h>

namespace attnpack {
namespace {

[[gnu::format(printf, 2, 3)]] void check_that(bool holds, const char* format, ...) {
  if (holds) return;
  char text[512];
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  throw Refused{std::string("attnpack: ") + text};
}

// The members that the caller knows, and the defaults of those that it does not.
attnpack_attention_args known_members(const attnpack_attention_args& args) {
  constexpr size_t kFirst = offsetof(attnpack_attention_args, num_pages) + sizeof(int64_t);  // of version 0.1
  attnpack_attention_args known = attnpack_attention_defaults();
  check_that(args.struct_size >= kFirst && args.struct_size <= sizeof(known),
             "args.struct_size is %zu, wants %zu to %zu: begin with attnpack_attention_defaults(), and run a library "
             "that is not older than the header",
             args.struct_size, kFirst, sizeof(known));
  std::memcpy(&known, &args, args.struct_size);
  return known;
}

DType kernel_dtype(const char* name, attnpack_dtype dtype, bool or_bool) {
  switch (dtype) {
    case ATTNPACK_FLOAT64:
      return DType::kFloat64;
    case ATTNPACK_FLOAT32:
      return DType::kFloat32;
    case ATTNPACK_BFLOAT16:
      return DType::kBFloat16;
    case ATTNPACK_FLOAT16:
      return DType::kFloat16;
    case ATTNPACK_BOOL:
      if (or_bool) return DType::kBool;
  }
  check_that(false, "%s is %d, wants %sATTNPACK_FLOAT64, _FLOAT32, _BFLOAT16 or _FLOAT16", name,
             static_cast<int>(dtype), or_bool ? "ATTNPACK_BOOL, " : "");
  return DType::kFloat32;
}

// Refuses sizes that no process can have: products of them overflow where strides and scratch are computed. Empty
// dimensions count as one.
void check_bytes(const char* name, int64_t element_size, std::initializer_list<int64_t> sizes) {
  int64_t most = (int64_t{1} << 56) / element_size;  // no processor addresses more bytes for a process
  std::string shape;
  for (const int64_t size : sizes) {
    most /= std::max<int64_t>(size, 1);
    shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  }
  check_that(most > 0, "%s [%s] takes more memory than a process can have: wants the sizes of its tensor", name,
             shape.c_str());
}

Strides kernel_strides(const attnpack_strides& given, int64_t heads, int64_t rows, int64_t width) {
  if (given.batch || given.head || given.row) return {given.batch, given.head, given.row, 1};
  return {heads * rows * width, rows * width, width, 1};
}

}  // namespace

AttentionCall::AttentionCall(const attnpack_attention_args& args) : args_(known_members(args)) {
  check();
  if (is_empty()) return;
  AttentionParams p{};
  fill(p);
  if (p.block_table)
    cut_into_sequences(p);
  else
    calls_.push_back(p);
}

void AttentionCall::check() const {
  const attnpack_attention_args& a = args_;
  const struct {
    const char* name;
    int64_t size;
  } sizes[] = {{"batch", a.batch},   {"num_heads", a.num_heads}, {"num_kv_heads", a.num_kv_heads}, {"q_len", a.q_len},
               {"kv_len", a.kv_len}, {"head_dim", a.head_dim},   {"v_head_dim", a.v_head_dim}};
  for (const auto& [name, size] : sizes) check_that(size >= 0, "%s is %" PRId64 ", wants 0 or more", name, size);
  const DType dtype = kernel_dtype("dtype", a.dtype, false);
  const bool wide = dtype == DType::kFloat64;
  check_that(!a.block_table || a.page_size > 0, "page_size is %" PRId64 ", wants the keys of a page", a.page_size);
  check_memory(bytes_of(dtype));  // before the arrays of so many numbers are read
  const auto needs = [](const char* name, const void* pointer, bool has_numbers) {
    check_that(pointer || !has_numbers, "%s is NULL, wants a pointer to its numbers", name);
  };
  const bool has_queries = a.batch && a.num_heads && a.q_len;
  const bool has_keys = a.num_kv_heads && (a.block_table ? a.num_pages && a.page_size > 0 : a.batch && a.kv_len);
  needs("query", a.query, has_queries && a.head_dim);
  needs("key", a.key, has_keys && a.head_dim);
  needs("value", a.value, has_keys && a.v_head_dim);
  needs("out", a.out, has_queries && a.v_head_dim);
  check_that(a.num_kv_heads || !a.num_heads, "num_kv_heads is 0, num_heads %" PRId64 ": wants at least one kv head",
             a.num_heads);
  for (int64_t h = 0; a.head_map && h < a.num_heads; ++h)
    check_that(a.head_map[h] >= 0 && a.head_map[h] < a.num_kv_heads,
               "head_map[%" PRId64 "] is %" PRId64 ", wants 0 to %" PRId64, h, a.head_map[h], a.num_kv_heads - 1);
  check_that(a.head_map || !a.num_kv_heads || a.num_heads % a.num_kv_heads == 0,
             "num_heads is %" PRId64 ", which %" PRId64
             " kv heads do not divide: pass head_map, the kv head of each query head",
             a.num_heads, a.num_kv_heads);
  check_that(a.window_left >= -1 && a.window_right >= -1,
             "the window is %" PRId64 ", %" PRId64 ", wants numbers >= 0, or -1 for unbounded", a.window_left,
             a.window_right);
  check_that(a.chunk >= 0 && a.chunk <= kMostChunk,
             "chunk is %" PRId64 ", wants how many positions a chunk has, 1 to %" PRId64 ", or 0 for none", a.chunk,
             kMostChunk);
  check_that(a.softcap >= 0 && std::isfinite(a.softcap), "softcap is %g, wants a finite number > 0, or 0 for none",
             a.softcap);
  check_that(std::fabs(a.scale) <= greatest_scale(wide), "scale is %g, wants a number of at most %g, or 0", a.scale,
             greatest_scale(wide));
  check_that(!a.q_offset_end || !a.q_offset, "q_offset is %" PRId64 " with q_offset_end: wants one of them",
             a.q_offset);
  if (a.mask) kernel_dtype("mask_dtype", a.mask_dtype, true);
  for (int64_t b = 0; a.kv_lens && b < a.batch; ++b)
    check_that(a.kv_lens[b] >= 0 && a.kv_lens[b] <= a.kv_len,
               "kv_lens[%" PRId64 "] is %" PRId64 ", wants 0 to kv_len = %" PRId64, b, a.kv_lens[b], a.kv_len);
  if (a.block_table && !is_empty()) check_pages();
}

void AttentionCall::check_memory(int64_t element_size) const {
  const attnpack_attention_args& a = args_;
  check_bytes("query", element_size, {a.batch, a.num_heads, a.q_len, a.head_dim});
  check_bytes("out", element_size, {a.batch, a.num_heads, a.q_len, a.v_head_dim});
  check_bytes("lse", sizeof(double), {a.batch, a.num_heads, a.q_len});
  const int64_t stored = a.block_table ? a.num_pages : a.batch, rows = a.block_table ? a.page_size : a.kv_len;
  check_bytes("key", element_size, {stored, a.num_kv_heads, rows, a.head_dim});
  check_bytes("value", element_size, {stored, a.num_kv_heads, rows, a.v_head_dim});
  if (a.block_table) check_bytes("block_table", sizeof(int32_t), {a.batch, a.table_stride});
  if (a.mask) check_bytes("mask", 1, {a.batch, a.num_heads, a.q_len, a.kv_len});
}

void AttentionCall::check_pages() const {
  const attnpack_attention_args& a = args_;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t pages = valid(b) / a.page_size + (valid(b) % a.page_size != 0);
    check_that(pages <= a.table_stride,
               "table_stride is %" PRId64 ", sequence %" PRId64 " has %" PRId64 " keys, wants %" PRId64 " pages",
               a.table_stride, b, valid(b), pages);
    for (int64_t i = 0; i < pages; ++i) {
      const int32_t page = a.block_table[b * a.table_stride + i];
      check_that(page >= 0 && page < a.num_pages,
                 "block_table names page %d for sequence %" PRId64 ", wants 0 to %" PRId64, static_cast<int>(page), b,
                 a.num_pages - 1);
    }
  }
}

void AttentionCall::fill(AttentionParams& p) {
  const attnpack_attention_args& a = args_;
  p.batch = a.batch;
  p.num_heads = a.num_heads;
  p.num_kv_heads = a.num_kv_heads;
  p.q_len = a.q_len;
  p.kv_len = a.kv_len;
  p.head_dim = a.head_dim;
  p.v_head_dim = a.v_head_dim;
  p.dtype = kernel_dtype("dtype", a.dtype, false);
  p.query = a.query;
  p.key = a.key;
  p.value = a.value;
  p.out = a.out;
  const int64_t rows = a.block_table ? a.page_size : a.kv_len;
  p.query_strides = kernel_strides(a.query_strides, a.num_heads, a.q_len, a.head_dim);
  p.key_strides = kernel_strides(a.key_strides, a.num_kv_heads, rows, a.head_dim);
  p.value_strides = kernel_strides(a.value_strides, a.num_kv_heads, rows, a.v_head_dim);
  p.out_strides = kernel_strides(a.out_strides, a.num_heads, a.q_len, a.v_head_dim);
  if (!a.lse) lse_.reset(new double[a.batch * a.num_heads * a.q_len]);
  p.lse = a.lse ? a.lse : lse_.get();
  const bool wide = p.dtype == DType::kFloat64;
  p.scale = a.scale != 0 ? a.scale : default_scale(a.head_dim);
  p.softcap = usable_softcap(a.softcap, wide);
  p.causal = a.causal != 0;
  p.window_left = near_window(a.window_left);
  p.window_right = near_window(a.window_right);
  p.chunk = a.chunk;
  p.q_offset = near_offset(a.q_offset, a.window_left, a.window_right);
  if (a.q_offset_end) {
    for (int64_t b = 0; b < a.batch; ++b)
      q_offsets_.push_back(near_offset(valid(b) - a.q_len, a.window_left, a.window_right));
    p.q_offsets = q_offsets_.data();
  }
  p.kv_lens = a.kv_lens;
  if (a.head_map) {
    groups_ = group_heads({a.head_map, a.head_map + a.num_heads}, a.num_kv_heads);
    p.group_start = groups_.start.data();
    p.group_heads = groups_.heads.data();
  }
  p.sinks = a.sinks;
  p.alibi_slopes = a.alibi_slopes;
  if (a.mask) {
    const int64_t* s = a.mask_strides;
    const int64_t row = a.kv_len, head = a.q_len * row;
    p.mask = a.mask;
    p.mask_dtype = kernel_dtype("mask_dtype", a.mask_dtype, true);
    p.mask_strides = {a.num_heads * head, head, row, 1};
    if (s[0] || s[1] || s[2] || s[3]) p.mask_strides = {s[0], s[1], s[2], s[3]};
  }
  p.block_table = a.block_table;
  p.page_size = a.page_size;
  p.num_pages = a.num_pages;
  p.table_stride = a.table_stride;
}

// The kernels take pages for one sequence at a time.
void AttentionCall::cut_into_sequences(const AttentionParams& all) {
  const int64_t size = bytes_of(all.dtype), mask_size = bytes_of(all.mask_dtype);
  calls_.reserve(all.batch);
  for (int64_t b = 0; b < all.batch; ++b) {
    AttentionParams& p = calls_.emplace_back(all);
    p.batch = 1;
    p.kv_len = valid(b);
    p.kv_lens = nullptr;
    p.query = moved(all.query, b * all.query_strides.batch, size);
    p.out = moved(all.out, b * all.out_strides.batch, size);
    p.lse = moved(all.lse, b * all.num_heads * all.q_len, all.dtype == DType::kFloat64 ? 8 : 4);
    p.mask = moved(all.mask, b * all.mask_strides.batch, mask_size);
    if (all.q_offsets) p.q_offsets = all.q_offsets + b;
    p.block_table = all.block_table + b * all.table_stride;
  }
}

}  // namespace attnpack
