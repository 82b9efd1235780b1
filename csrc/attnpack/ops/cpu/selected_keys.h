#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <attnpack/ops/detail/attention_params.h>

// Attention over the keys that each row names (key_index). Each row of a kv head is a call of its own for the kernels,
// whose keys lie in pages: the selected blocks, sorted, each once (SelectedKeys in core/params.h).
namespace attnpack {

class SelectedCalls {
 public:
  // all: the prepared call over all keys; args: checked. Both outlive this object. Raises for a number out of range.
  SelectedCalls(const AttentionParams& all, const AttentionArguments& args, int64_t element_size);

  // The rows of the kv heads, those of a kv head one after the other.
  int64_t count() const { return all_.batch * all_.num_kv_heads * all_.q_len; }

  struct Row {
    int64_t b, kv_head, query;
    // Where the row's numbers stand in tensors [batch, q_len, num_heads].
    int64_t place;
  };
  Row row(int64_t index) const;

  // The call of a row. lse: [batch, q_len, num_heads].
  AttentionParams call(const Row& row, void* lse) const;

 private:
  const AttentionParams& all_;
  int64_t key_block_, index_heads_, names_, element_size_, mask_size_;
  Tensor lists_;                 // int32 [batch, index heads, q_len, names]: the blocks of a row first
  std::vector<int32_t> counts_;  // how many these are
  std::vector<int64_t> group_start_, group_heads_;
};

// The results of a prepared call with key_index.
AttentionResult attend_selected_keys(PreparedAttention& prepared, const Tensor& query, const AttentionArguments& args);

// The gradients of query, key and value of a prepared backward call with key_index; and grad_scores, if it is there.
void differentiate_selected_keys(PreparedBackward& prepared, const Tensor& query, const AttentionArguments& args);

}  // namespace attnpack
