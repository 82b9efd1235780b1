#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/run_attention.h>
#include <attnpack/ops/detail/schema.h>

// Sequences whose keys are in pages are one call, where each has equally many queries and few of them, as in decoding.
// Else this is a composition: one call of `attention` for each sequence. It reads cu_seqlens, so it waits for the
// device.
namespace attnpack {
namespace {

// The queries of each sequence where all have equally many, else -1. The sum and the longest sequence say so without
// waiting for the device, where the caller has given the longest.
int64_t queries_of_each(const Tensor& query, const Tensor& key, const Tensor& cu_seqlens_q,
                        const VarlenArguments& args) {
  const int64_t batch = cu_seqlens_q.size(0) - 1;
  if (batch == 0 || query.size(0) == 0 || query.size(0) % batch) return -1;
  const int64_t each = query.size(0) / batch;
  if (args.max_seqlen_q && !checks_numbers()) return args.max_seqlen_q->expect_int() == each ? each : -1;
  const std::vector<Sequence> sequences = read_sequences(query, key, cu_seqlens_q, args);
  const bool equal =
      std::all_of(sequences.begin(), sequences.end(), [&](const Sequence& s) { return s.q_len == each; });
  return equal ? each : -1;
}

// Attends pages by the kernel, or gives nothing where it does not take the call.
std::optional<AttentionResult> attend_pages_by_kernel(const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  const auto has_rows = [](const Tensor& pool) { return pool.size(3) <= 1 || pool.stride(3) == 1; };
  const CudaKernels* kernels = cuda_kernels(query.device().index());
  if (!kernels || args.dropout_p > 0 || args.chunk || key.size(0) == 0 || !has_rows(key) || !has_rows(value))
    return std::nullopt;
  const int64_t each = queries_of_each(query, key, cu_seqlens_q, args);
  if (each < 0) return std::nullopt;
  const auto here = [&](const Tensor& x) { return x.to(query.device(), at::kLong).contiguous(); };
  const int64_t batch = cu_seqlens_q.size(0) - 1;
  const Tensor table = args.block_table->to(query.device()).contiguous(), lens = here(*args.kv_lens);
  const Tensor rows = query.unflatten(0, {batch, each}).transpose(1, 2);  // [B, Hq, L, D]
  AttentionArguments shared = shared_arguments(args);
  if (args.q_offsets)
    shared.q_offsets = here(*args.q_offsets);
  else if (args.q_offset)
    shared.q_offset = *args.q_offset;
  else
    shared.q_offsets = lens - each;
  CudaAttention call = prepare_cuda_attention(rows, batch_of_pages(key), batch_of_pages(value), shared);
  AttentionParams& p = call.prepared.params;
  p.block_table = table.const_data_ptr<int32_t>();
  p.table_stride = table.size(1);
  p.page_size = key.size(1);
  p.num_pages = key.size(0);
  p.kv_len = table.size(1) * p.page_size;
  p.key_strides = kernel_strides(batch_of_pages(key));
  p.value_strides = kernel_strides(batch_of_pages(value));
  p.kv_lens = lens.const_data_ptr<int64_t>();
  if (!countable(rows, p.kv_len) || !kernels->reads_source(p, call.most_group, query.device().index()))
    return std::nullopt;
  const auto [out, lse] = run_cuda_forward(*kernels, call, rows);
  return AttentionResult{out.transpose(1, 2).flatten(0, 1).contiguous(), lse.transpose(0, 1).flatten(1).contiguous()};
}

}  // namespace

AttentionResult attention_varlen_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  check_attention_varlen(query, key, value, cu_seqlens_q, args);
  if (args.block_table)
    if (const auto result = attend_pages_by_kernel(query, key, value, cu_seqlens_q, args)) return *result;
  return attend_each_sequence(&attention_op, query, key, value, cu_seqlens_q, args);
}

}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_cuda>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::differentiate_each_sequence>);
}
