#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/varlen_arguments.h>

namespace attnpack {
namespace {

void check_rows(const char* name, const Tensor& t) {
  ATTNPACK_CHECK(t.dim() == 3, name, " has shape ", t.sym_sizes(), ", wants 3 dimensions [tokens, heads, head_dim]: ",
                 "join the sequences, and split [tokens, heads * head_dim] with .unflatten(-1, (heads, head_dim))");
}

void check_no_meta(const char* name, const Tensor& t, const Tensor& query) {
  ATTNPACK_CHECK(!t.is_meta() || query.is_meta(), name, " is on meta, query on ", query.device(),
                 ": pass numbers, not a meta tensor");
}

void check_ends(const char* name, const Tensor& t, const Tensor& query) {
  ATTNPACK_CHECK(t.dim() == 1 && t.sym_size(0) >= 1, name, " has shape ", t.sym_sizes(),
                 ", wants [sequences + 1]: where each sequence begins, and the end of the last");
  ATTNPACK_CHECK(is_int32_or_int64(t), name, " has dtype ", t.scalar_type(),
                 ", wants int32 or int64: call .int() on it");
  check_no_meta(name, t, query);
}

void check_most(const char* name, const std::optional<c10::SymInt>& most) {
  ATTNPACK_CHECK(!most || *most >= 0, name, " is ", *most, ", wants the longest sequence's length, or none");
}

// One number per sequence.
void check_numbers(const char* name, const Tensor& t, const Tensor& cu_seqlens_q, const Tensor& query) {
  ATTNPACK_CHECK(t.dim() == 1 && t.sym_size(0) + 1 == cu_seqlens_q.sym_size(0), name, " has shape ", t.sym_sizes(),
                 ", wants [sequences] = [", cu_seqlens_q.sym_size(0) - 1, "]: one number per sequence");
  ATTNPACK_CHECK(is_int32_or_int64(t), name, " has dtype ", t.scalar_type(),
                 ", wants int32 or int64: call .long() on it");
  check_no_meta(name, t, query);
}

void check_pool(const char* name, const Tensor& t) {
  ATTNPACK_CHECK(t.dim() == 4, name, " has shape ", t.sym_sizes(), ", wants a pool [num_pages, page_size, ",
                 "num_kv_heads, head_dim] with block_table: permute() other layouts, whose views cost nothing");
  ATTNPACK_CHECK(t.sym_size(1) >= 1, name, " has pages of ", t.sym_size(1), " rows, wants at least 1");
}

void check_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                 const VarlenArguments& args) {
  check_rows("query", query);
  check_pool("key", key);
  check_pool("value", value);
  ATTNPACK_CHECK(value.sym_size(0) == key.sym_size(0), "value has ", value.sym_size(0), " pages, key ", key.sym_size(0),
                 ": they must agree");
  check_ends("cu_seqlens_q", cu_seqlens_q, query);
  ATTNPACK_CHECK(!args.cu_seqlens_k, "cu_seqlens_k is given with block_table, wants none: kv_lens says how many keys ",
                 "of its pages each sequence has");
  ATTNPACK_CHECK(args.kv_lens, "kv_lens is missing with block_table: pass int32 or int64 [sequences], the keys of ",
                 "each sequence");
  check_numbers("kv_lens", *args.kv_lens, cu_seqlens_q, query);
  const Tensor& table = *args.block_table;
  ATTNPACK_CHECK(table.dim() == 2 && table.sym_size(0) + 1 == cu_seqlens_q.sym_size(0), "block_table has shape ",
                 table.sym_sizes(), ", wants [sequences, max_pages] with sequences = ", cu_seqlens_q.sym_size(0) - 1,
                 ": the pages of each sequence, in order");
  ATTNPACK_CHECK(table.scalar_type() == at::kInt, "block_table has dtype ", table.scalar_type(),
                 ", wants int32: call .int() on it");
  check_no_meta("block_table", table, query);
}

}  // namespace

void check_attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                            const VarlenArguments& args) {
  check_most("max_seqlen_q", args.max_seqlen_q);
  check_most("max_seqlen_k", args.max_seqlen_k);
  if (args.block_table) {
    check_pages(query, key, value, cu_seqlens_q, args);
    if (args.q_offsets) check_numbers("q_offset", *args.q_offsets, cu_seqlens_q, query);
    const c10::SymInt pages = key.sym_size(0);
    const Tensor rows = one_batch(query).expand_symint({pages, -1, -1, -1});
    return check_attention(rows, batch_of_pages(key), batch_of_pages(value), shared_arguments(args));
  }
  ATTNPACK_CHECK(!args.kv_lens, "kv_lens is given without block_table: cu_seqlens_k says how many keys a packed ",
                 "sequence has");
  check_rows("query", query);
  check_rows("key", key);
  check_rows("value", value);
  ATTNPACK_CHECK(value.sym_size(0) == key.sym_size(0), "value has ", value.sym_size(0), " rows, key ", key.sym_size(0),
                 ": they must agree");
  check_ends("cu_seqlens_q", cu_seqlens_q, query);
  if (args.cu_seqlens_k) {
    check_ends("cu_seqlens_k", *args.cu_seqlens_k, query);
    ATTNPACK_CHECK(args.cu_seqlens_k->sym_size(0) == cu_seqlens_q.sym_size(0), "cu_seqlens_k has shape ",
                   args.cu_seqlens_k->sym_sizes(), ", wants ", cu_seqlens_q.sym_sizes(),
                   " as cu_seqlens_q: one number per sequence, and the end");
  } else {
    ATTNPACK_CHECK(key.sym_size(0) == query.sym_size(0), "key has ", key.sym_size(0), " rows, query ",
                   query.sym_size(0), ": pass cu_seqlens_k, where each sequence's keys begin");
  }
  if (args.q_offsets) check_numbers("q_offset", *args.q_offsets, cu_seqlens_q, query);
  check_attention(one_batch(query), one_batch(key), one_batch(value), shared_arguments(args));
}

void check_attention_varlen_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
                                     const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                                     const Tensor& cu_seqlens_q, const VarlenArguments& args, bool sinks_gradient) {
  ATTNPACK_CHECK(!args.block_table, "block_table is given, and keys in pages have no gradients: call ",
                 "attention_varlen with packed key and value");
  check_attention_varlen(query, key, value, cu_seqlens_q, args);
  check_rows("grad_out", grad_out);
  check_rows("out", out);
  const auto check_lse = [](const char* name, const Tensor& t) {
    ATTNPACK_CHECK(t.dim() == 2, name, " has shape ", t.sym_sizes(), ", wants [num_heads, tokens]: pass what belongs ",
                   "to one call of attention_varlen");
  };
  check_lse("lse", lse);
  if (grad_lse) check_lse("grad_lse", *grad_lse);
  check_attention_backward(one_batch(grad_out), grad_lse ? std::make_optional(grad_lse->unsqueeze(0)) : std::nullopt,
                           one_batch(query), one_batch(key), one_batch(value), one_batch(out), lse.unsqueeze(0),
                           shared_arguments(args), false, sinks_gradient);
}

}  // namespace attnpack
