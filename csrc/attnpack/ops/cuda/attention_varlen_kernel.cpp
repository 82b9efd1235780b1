#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/run_attention.h>
#include <attnpack/ops/detail/schema.h>

// All sequences are one call of the kernels, which read the lengths on the device. Calls that these do not take are a
// composition: one call of `attention` for each sequence. It reads cu_seqlens, so it waits for the device.
namespace attnpack {
namespace {

// One call for all sequences, and what its params point to.
struct PackedAttention {
  CudaAttention call;
  Tensor query;                              // [1, heads, all queries, head_dim], or [sequences, heads, queries, ...]
  Tensor query_ends, key_ends, table, lens;  // on the device
};

// The queries of each sequence where all have equally many, as in decoding, or 0. The sum and the longest sequence say
// so without waiting for the device.
int64_t equal_queries(const Tensor& query, int64_t sequences, const VarlenArguments& args) {
  const int64_t longest = args.max_seqlen_q ? args.max_seqlen_q->expect_int() : 0;
  return longest * sequences == query.size(0) ? longest : 0;
}

// The rows of a long sequence: the hint, if it can be right, else the mean.
int64_t likely_rows(const std::optional<c10::SymInt>& hint, int64_t rows, int64_t sequences) {
  const int64_t mean = (rows + sequences - 1) / sequences;
  return hint ? std::clamp(hint->expect_int(), mean, rows) : mean;
}

// Nothing where the kernels do not take the call.
std::optional<PackedAttention> prepare_packed(const CudaKernels& kernels, const Tensor& query, const Tensor& key,
                                              const Tensor& value, const Tensor& cu_seqlens_q,
                                              const VarlenArguments& args) {
  const auto has_rows = [](const Tensor& pool) { return pool.size(3) <= 1 || pool.stride(3) == 1; };
  const int64_t sequences = cu_seqlens_q.size(0) - 1;
  const bool paged = args.block_table.has_value();
  if (sequences == 0 || args.dropout_p > 0 || args.chunk) return std::nullopt;
  if (paged && (key.size(0) == 0 || !has_rows(key) || !has_rows(value))) return std::nullopt;
  if (checks_numbers()) read_sequences(query, key, cu_seqlens_q, args);

  PackedAttention r;
  const auto here = [&](const Tensor& x) { return x.to(query.device(), at::kLong).contiguous(); };
  const auto heads = [&](const Tensor& x) { return paged ? batch_of_pages(x) : one_batch(x); };
  AttentionArguments shared = shared_arguments(args);
  if (args.q_offset) shared.q_offset = *args.q_offset;
  if (args.q_offsets) shared.q_offsets = here(*args.q_offsets);
  const int64_t each = paged ? equal_queries(query, sequences, args) : 0;
  r.query = each ? query.unflatten(0, {sequences, each}).transpose(1, 2) : one_batch(query);
  r.call = prepare_cuda_attention(r.query, heads(key), heads(value), shared);
  AttentionParams& p = r.call.prepared.params;
  p.at_end = !args.q_offset && !args.q_offsets;
  if (!each) {
    r.query_ends = here(cu_seqlens_q);
    p.sequences = sequences;
    p.query_ends = r.query_ends.const_data_ptr<int64_t>();
    p.likely_queries = likely_rows(args.max_seqlen_q, query.size(0), sequences);
  }
  if (paged) {
    r.table = args.block_table->to(query.device()).contiguous();
    r.lens = here(*args.kv_lens);
    p.block_table = r.table.const_data_ptr<int32_t>();
    p.table_stride = r.table.size(1);
    p.page_size = key.size(1);
    p.num_pages = key.size(0);
    p.kv_len = p.table_stride * p.page_size;
    p.key_strides = kernel_strides(batch_of_pages(key));
    p.value_strides = kernel_strides(batch_of_pages(value));
    p.kv_lens = r.lens.const_data_ptr<int64_t>();
  } else {
    r.key_ends = args.cu_seqlens_k ? here(*args.cu_seqlens_k) : r.query_ends;
    p.key_ends = r.key_ends.const_data_ptr<int64_t>();
    p.likely_keys = likely_rows(args.max_seqlen_k, key.size(0), sequences);
  }
  const bool read = !paged || kernels.reads_source(p, r.call.most_group, query.device().index());
  if (!read || !countable(r.query, p.kv_len)) return std::nullopt;
  return r;
}

}  // namespace

AttentionResult attention_varlen_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  check_attention_varlen(query, key, value, cu_seqlens_q, args);
  if (const CudaKernels* kernels = cuda_kernels(query.device().index()))
    if (auto packed = prepare_packed(*kernels, query, key, value, cu_seqlens_q, args)) {
      const auto [out, lse] = run_cuda_forward(*kernels, packed->call, packed->query);
      return {out.transpose(1, 2).flatten(0, 1).contiguous(), lse.transpose(0, 1).flatten(1).contiguous()};
    }
  return attend_each_sequence(&attention_op, query, key, value, cu_seqlens_q, args);
}

VarlenGradients attention_varlen_backward_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                               const VarlenArguments& args, bool sinks_gradient) {
  check_attention_varlen_backward(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args, sinks_gradient);
  if (const CudaKernels* kernels = cuda_kernels(query.device().index()))
    if (const auto packed = prepare_packed(*kernels, query, key, value, cu_seqlens_q, args)) {
      const auto one = [](const Tensor& rows) { return rows.unsqueeze(0); };  // [1, heads, tokens]
      PreparedBackward r = prepare_backward(
          packed->call.prepared, one_batch(grad_out), grad_lse ? std::make_optional(one(*grad_lse)) : std::nullopt,
          packed->query, one_batch(key), one_batch(value), one_batch(out), one(lse), /*mask_gradient=*/false);
      run_cuda_backward(*kernels, packed->call, r, query);
      return {packed_rows(r.grad_query), packed_rows(r.grad_key), packed_rows(r.grad_value),
              sinks_gradient ? grad_of_sinks(*args.sinks, one(lse), r.delta) : at::empty({0}, query.options())};
    }
  return differentiate_each_sequence(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args,
                                     sinks_gradient);
}

}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_cuda>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::attention_varlen_backward_cuda>);
}
