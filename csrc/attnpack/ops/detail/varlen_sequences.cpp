#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/core/dropout.h>
#include <attnpack/ops/detail/read_numbers.h>
#include <attnpack/ops/detail/varlen_arguments.h>

namespace attnpack {
namespace {

std::vector<int64_t> read_ends(const char* name, const Tensor& cu_seqlens, const char* packed, int64_t rows) {
  const std::vector<int64_t> ends = read_numbers(cu_seqlens);
  ATTNPACK_CHECK(ends.front() == 0, name, "[0] is ", ends.front(), ", wants 0: the first sequence begins at row 0");
  for (size_t b = 0; b + 1 < ends.size(); ++b)
    ATTNPACK_CHECK(ends[b] <= ends[b + 1], name, "[", b + 1, "] is ", ends[b + 1], " after ", ends[b],
                   ", wants numbers that never fall: where each sequence begins, and the end of the last");
  ATTNPACK_CHECK(ends.back() == rows, name, " ends at ", ends.back(), ", wants ", rows, ", the rows of ", packed,
                 ": pass the rows of all sequences, and no others");
  return ends;
}

// Where no keys are packed: the numbers of keys say how many pages each sequence reads.
std::vector<int64_t> read_paged_lengths(const Tensor& key, const VarlenArguments& args) {
  const Tensor& table = *args.block_table;
  const int64_t num_pages = key.size(0), page_size = key.size(1), most = table.size(1);
  const std::vector<int64_t> lengths = read_numbers(*args.kv_lens);
  const Tensor read = at::isTensorSubclassLike(table) ? Tensor() : table.cpu();
  for (size_t b = 0; b < lengths.size(); ++b) {
    ATTNPACK_CHECK(lengths[b] >= 0 && pages_of(lengths[b], page_size) <= most, "kv_lens[", b, "] is ", lengths[b],
                   ", wants 0 to ", most * page_size, ", which ", most, " pages of ", page_size, " keys hold");
    if (!read.defined()) continue;
    const int32_t* pages = read.const_data_ptr<int32_t>() + b * read.stride(0);
    for (int64_t i = 0; i < pages_of(lengths[b], page_size); ++i)
      ATTNPACK_CHECK(pages[i * read.stride(1)] >= 0 && pages[i * read.stride(1)] < num_pages, "block_table[", b, ", ",
                     i, "] is ", pages[i * read.stride(1)], ", wants a page from 0 to ", num_pages - 1, ": kv_lens[", b,
                     "] = ", lengths[b], " keys read it");
  }
  return lengths;
}

// The keys or values of sequence number b, gathered from their pages.
Tensor gathered(const Tensor& pool, const VarlenArguments& args, size_t b, int64_t kv_len) {
  const Tensor pages = args.block_table->select(0, b).narrow(0, 0, pages_of(kv_len, pool.size(1))).to(pool.device());
  return pool.index_select(0, pages).flatten(0, 1).narrow(0, 0, kv_len);
}

}  // namespace

std::vector<Sequence> read_sequences(const Tensor& query, const Tensor& key, const Tensor& cu_seqlens_q,
                                     const VarlenArguments& args) {
  const std::vector<int64_t> queries = read_ends("cu_seqlens_q", cu_seqlens_q, "query", query.size(0));
  const std::vector<int64_t> lengths = args.block_table ? read_paged_lengths(key, args) : std::vector<int64_t>();
  const std::vector<int64_t> keys = args.block_table ? std::vector<int64_t>(queries.size(), 0)
                                    : args.cu_seqlens_k
                                        ? read_ends("cu_seqlens_k", *args.cu_seqlens_k, "key", key.size(0))
                                        : read_ends("cu_seqlens_q", cu_seqlens_q, "key", key.size(0));
  const std::vector<int64_t> offsets = args.q_offsets ? read_numbers(*args.q_offsets) : std::vector<int64_t>();
  std::vector<Sequence> sequences(queries.size() - 1);
  for (size_t b = 0; b < sequences.size(); ++b) {
    Sequence& s = sequences[b];
    s = {queries[b], queries[b + 1] - queries[b], keys[b], args.block_table ? lengths[b] : keys[b + 1] - keys[b], 0};
    s.q_offset = args.q_offsets  ? offsets[b]
                 : args.q_offset ? args.q_offset->guard_int(__FILE__, __LINE__)
                                 : s.kv_len - s.q_len;
  }
  return sequences;
}

AttentionArguments shared_arguments(const VarlenArguments& args) {
  AttentionArguments r{args};
  r.dropout_seed = args.dropout_seed;
  return r;
}

AttentionArguments sequence_arguments(const VarlenArguments& args, const Sequence& sequence, int64_t b) {
  AttentionArguments r = shared_arguments(args);
  r.q_offset = sequence.q_offset;
  if (args.dropout_p > 0) {
    const auto seed = static_cast<uint64_t>(args.dropout_seed->item<int64_t>());
    r.dropout_seed = at::full({1}, static_cast<int64_t>(sequence_seed(seed, b)), at::kLong);
  }
  return r;
}

AttentionResult attend_each_sequence(Attend attend, const Tensor& query, const Tensor& key, const Tensor& value,
                                     const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  check_attention_varlen(query, key, value, cu_seqlens_q, args);
  const std::vector<Sequence> sequences = read_sequences(query, key, cu_seqlens_q, args);
  std::vector<Tensor> outs, lses;
  for (size_t b = 0; b < sequences.size(); ++b) {
    const Sequence& s = sequences[b];
    const auto keys = [&](const Tensor& x) {
      return one_batch(args.block_table ? gathered(x, args, b, s.kv_len) : x.narrow(0, s.first_key, s.kv_len));
    };
    const auto [out, lse] = attend(one_batch(query.narrow(0, s.first_query, s.q_len)), keys(key), keys(value),
                                   sequence_arguments(args, s, b));
    outs.push_back(packed_rows(out));
    lses.push_back(lse.squeeze(0));
  }
  if (outs.empty()) {  // no sequence: one without rows gives the shapes and dtypes
    const auto none = [&](const Tensor& x) {
      return one_batch(args.block_table ? x.flatten(0, 1).narrow(0, 0, 0) : x);
    };
    const auto [out, lse] = attend(one_batch(query), none(key), none(value), shared_arguments(args));
    return {packed_rows(out), lse.squeeze(0)};
  }
  return {at::cat(outs, 0), at::cat(lses, 1)};
}

VarlenGradients differentiate_each_sequence(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                            const VarlenArguments& args, bool sinks_gradient) {
  check_attention_varlen_backward(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args, sinks_gradient);
  const std::vector<Sequence> sequences = read_sequences(query, key, cu_seqlens_q, args);
  std::vector<Tensor> queries{query.narrow(0, 0, 0)}, keys{key.narrow(0, 0, 0)}, values{value.narrow(0, 0, 0)};
  Tensor sinks = sinks_gradient ? at::zeros_like(*args.sinks) : at::empty({0}, query.options());
  for (size_t b = 0; b < sequences.size(); ++b) {
    const Sequence& s = sequences[b];
    const auto rows = [&](const Tensor& x) { return one_batch(x.narrow(0, s.first_query, s.q_len)); };
    const auto kv = [&](const Tensor& x) { return one_batch(x.narrow(0, s.first_key, s.kv_len)); };
    const auto per_row = [&](const Tensor& x) { return x.narrow(1, s.first_query, s.q_len).unsqueeze(0); };
    const auto grad = attention_backward_op(
        rows(grad_out), grad_lse ? std::make_optional(per_row(*grad_lse)) : std::nullopt, rows(query), kv(key),
        kv(value), rows(out), per_row(lse), sequence_arguments(args, s, b), /*mask_gradient=*/false, sinks_gradient);
    queries.push_back(packed_rows(std::get<0>(grad)));
    keys.push_back(packed_rows(std::get<1>(grad)));
    values.push_back(packed_rows(std::get<2>(grad)));
    if (sinks_gradient) sinks = sinks + std::get<4>(grad);
  }
  return {at::cat(queries, 0), at::cat(keys, 0), at::cat(values, 0), sinks};
}

}  // namespace attnpack
