#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstring>

#include <attnpack/core/dropout.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/loop_threads.h>
#include <attnpack/ops/cpu/sums.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/extremes.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/varlen_arguments.h>

// Each sequence is a call of its own for the kernels: a batch of one, which points into the packed tensors.
namespace attnpack {
namespace {

template <class Pointer>
Pointer row_at(Pointer base, const Strides& strides, int64_t row, int64_t element_size) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(base) + row * strides.row * element_size;
}

Strides without_batch(Strides strides) {
  strides.batch = 0;
  return strides;
}

// The calls of all sequences. `all` is the call that takes the packed tensors as one sequence. Each call's lse is a
// piece [heads, q_len] of a buffer, one after the other.
std::vector<AttentionParams> make_calls(const AttentionParams& all, const std::vector<Sequence>& sequences,
                                        const VarlenArguments& args, int64_t element_size, int64_t lse_size) {
  std::vector<AttentionParams> calls;
  calls.reserve(sequences.size());
  for (size_t b = 0; b < sequences.size(); ++b) {
    const Sequence& s = sequences[b];
    AttentionParams& p = calls.emplace_back(all);
    p.q_len = s.q_len;
    p.kv_len = s.kv_len;
    p.q_offset = near_offset(s.q_offset, args.window[0], args.window[1]);
    p.query = row_at(all.query, all.query_strides, s.first_query, element_size);
    p.key = row_at(all.key, all.key_strides, s.first_key, element_size);
    p.value = row_at(all.value, all.value_strides, s.first_key, element_size);
    p.out = all.out ? row_at(all.out, all.out_strides, s.first_query, element_size) : nullptr;
    p.lse = static_cast<char*>(all.lse) + s.first_query * all.num_heads * lse_size;
    p.query_strides = without_batch(all.query_strides);
    p.out_strides = without_batch(all.out_strides);
    if (all.block_table) {
      p.block_table = all.block_table + b * args.block_table->size(1);
    } else {
      p.key_strides = without_batch(all.key_strides);
      p.value_strides = without_batch(all.value_strides);
    }
    p.dropout_seed = sequence_seed(all.dropout_seed, b);
  }
  return calls;
}

// Copies between rows [heads, tokens] and the pieces [heads, q_len] of the sequences.
enum class Direction { kToPieces, kToRows };
Tensor rearranged(const Tensor& from, const std::vector<Sequence>& sequences, Direction direction) {
  const Tensor source = from.contiguous(), result = at::empty_like(source);
  const int64_t heads = source.size(-2), tokens = source.size(-1), size = source.element_size();
  const char* in = static_cast<const char*>(source.const_data_ptr());
  char* out = static_cast<char*>(result.mutable_data_ptr());
  for (const Sequence& s : sequences)
    for (int64_t h = 0; h < heads && s.q_len > 0; ++h) {
      const int64_t row = (h * tokens + s.first_query) * size, piece = (s.first_query * heads + h * s.q_len) * size;
      const bool to_pieces = direction == Direction::kToPieces;
      std::memcpy(out + (to_pieces ? piece : row), in + (to_pieces ? row : piece), s.q_len * size);
    }
  return result;
}

AttentionResult attention_varlen_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  check_attention_varlen(query, key, value, cu_seqlens_q, args);
  // The kernels read whole rows.
  const auto has_rows = [](const Tensor& pool) { return pool.size(3) <= 1 || pool.stride(3) == 1; };
  if (args.block_table && !(has_rows(key) && has_rows(value)))
    return attend_each_sequence(&attention_op, query, key, value, cu_seqlens_q, args);
  const std::vector<Sequence> sequences = read_sequences(query, key, cu_seqlens_q, args);
  const auto heads = [&](const Tensor& x) { return args.block_table ? batch_of_pages(x) : one_batch(x); };
  PreparedAttention prepared = prepare_attention(one_batch(query), heads(key), heads(value), shared_arguments(args));
  const Tensor table = args.block_table ? args.block_table->cpu().contiguous() : Tensor();
  if (args.block_table) {
    prepared.params.block_table = table.const_data_ptr<int32_t>();
    prepared.params.page_size = key.size(1);
  }
  const auto [out, lse] = make_outputs(prepared, one_batch(query));
  run_forward(kernels_in_use(), make_calls(prepared.params, sequences, args, query.element_size(), lse.element_size()),
              kLoopThreads);
  const Tensor rows = sequences.size() == 1 ? lse : rearranged(lse, sequences, Direction::kToRows);
  return {packed_rows(out), rows.squeeze(0)};
}

// Sets the pointers of each sequence's call, and the buffers that its units share.
struct BackwardCalls {
  std::vector<AttentionParams> forward;
  std::vector<AttentionBackwardParams> calls;
  Tensor sums, done;  // what the calls point to
};

void make_backward_calls(BackwardCalls& r, const AttentionBackwardParams& all, const std::vector<Sequence>& sequences,
                         const Tensor& delta, const Tensor& grad_lse, int64_t element_size) {
  const AttentionParams& shared = all.forward;
  const int64_t size = delta.element_size(), width = sums_width(shared.head_dim);
  const Counts tiles(sequences.size(), [&](size_t b) {
    const Tiling t = tile_rows(r.forward[b]);
    return t.kv_heads * t.tiles;
  });
  r.sums = at::empty({shared.num_heads * shared.q_len, width}, delta.options());
  r.done = at::zeros({tiles.total()}, at::kInt);
  r.calls.reserve(sequences.size());
  for (size_t b = 0; b < sequences.size(); ++b) {
    const Sequence& s = sequences[b];
    AttentionBackwardParams& bp = r.calls.emplace_back(all);
    bp.forward = r.forward[b];
    bp.grad_out = row_at(all.grad_out, all.grad_out_strides, s.first_query, element_size);
    bp.grad_query = row_at(all.grad_query, all.grad_query_strides, s.first_query, element_size);
    bp.grad_key = row_at(all.grad_key, all.grad_key_strides, s.first_key, element_size);
    bp.grad_value = row_at(all.grad_value, all.grad_value_strides, s.first_key, element_size);
    bp.delta = static_cast<const char*>(delta.const_data_ptr()) + s.first_query * shared.num_heads * size;
    if (grad_lse.defined())
      bp.grad_lse = static_cast<const char*>(grad_lse.const_data_ptr()) + s.first_query * shared.num_heads * size;
    bp.grad_query_sums =
        static_cast<char*>(r.sums.mutable_data_ptr()) + s.first_query * shared.num_heads * width * size;
    bp.blocks_done = r.done.mutable_data_ptr<int32_t>() + tiles.before(b);
    bp.tiles = tile_rows(bp.forward).tiles;
  }
}

VarlenGradients attention_varlen_backward_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                              const Tensor& query, const Tensor& key, const Tensor& value,
                                              const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                              const VarlenArguments& args, bool sinks_gradient) {
  check_attention_varlen_backward(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args, sinks_gradient);
  const std::vector<Sequence> sequences = read_sequences(query, key, cu_seqlens_q, args);
  const Tensor q = one_batch(query), k = one_batch(key), v = one_batch(value), all_lse = lse.unsqueeze(0);
  const PreparedAttention prepared = prepare_attention(q, k, v, shared_arguments(args));
  PreparedBackward r =
      prepare_backward(prepared, one_batch(grad_out), grad_lse ? std::make_optional(grad_lse->unsqueeze(0)) : grad_lse,
                       q, k, v, one_batch(out), all_lse, false);
  const Tensor lse_pieces = rearranged(r.lse, sequences, Direction::kToPieces);
  const Tensor delta_pieces = rearranged(r.delta, sequences, Direction::kToPieces);
  const Tensor grad_lse_pieces =
      r.grad_lse.defined() ? rearranged(r.grad_lse, sequences, Direction::kToPieces) : Tensor();
  AttentionBackwardParams& all = r.params;
  all.forward.lse = lse_pieces.data_ptr();
  BackwardCalls calls{.forward = make_calls(all.forward, sequences, args, query.element_size(), lse.element_size())};
  make_backward_calls(calls, all, sequences, delta_pieces, grad_lse_pieces, query.element_size());
  for (const Sequence& s : sequences)
    if (key.size(1) * s.kv_len == 0) r.grad_query.narrow(2, s.first_query, s.q_len).zero_();
  run_backward(kernels_in_use(), calls.calls, kLoopThreads);
  Tensor grad_sinks = at::empty({0}, query.options());
  if (sinks_gradient) grad_sinks = sinks_gradient_in_order(*args.sinks, all_lse, r.delta);
  return {packed_rows(r.grad_query), packed_rows(r.grad_key), packed_rows(r.grad_value), grad_sinks};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_cpu>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::attention_varlen_backward_cpu>);
}
