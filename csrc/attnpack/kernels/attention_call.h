#pragma once

#include <memory>
#include <string>
#include <vector>

#include <attnpack/core/head_groups.h>
#include <attnpack/core/params.h>
#include <attnpack/kernels.h>

namespace attnpack {

// A wrong argument, as a sentence.
struct Refused {
  std::string sentence;
};

// The arguments of attnpack_attention as calls for the kernels, and what the calls point to. Throws Refused.
class AttentionCall {
 public:
  explicit AttentionCall(const attnpack_attention_args& args);
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;
  // One for the batch; with pages one for each sequence. None where there is nothing to compute.
  const std::vector<AttentionParams>& calls() const { return calls_; }

 private:
  bool is_empty() const { return !args_.batch || !args_.num_heads || !args_.q_len; }
  void check() const;
  void check_memory(int64_t element_size) const;
  void check_pages() const;
  void fill(AttentionParams& p);
  void cut_into_sequences(const AttentionParams& all);
  int64_t valid(int64_t b) const { return args_.kv_lens ? args_.kv_lens[b] : args_.kv_len; }

  attnpack_attention_args args_;
  HeadGroups groups_;
  std::vector<int64_t> q_offsets_;
  std::unique_ptr<double[]> lse_;  // where the caller wants none
  std::vector<AttentionParams> calls_;
};

}  // namespace attnpack
