#pragma once

#include <attnpack/ops/detail/attention_arguments.h>

namespace attnpack {

// Attention over the keys that each row names (key_index): pieces of the rows as the batch of a call over copies of
// their keys. A number out of range names no key; with ATTNPACK_CHECK=1 it raises. With dropout the formula runs, which
// holds the scores of all keys, so that every derivative sees one draw.
AttentionResult attend_selected_keys_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const AttentionArguments& args);
AttentionGradients differentiate_selected_keys_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                                    const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const Tensor& out, const Tensor& lse,
                                                    const AttentionArguments& args, bool mask_gradient,
                                                    bool sinks_gradient);

}  // namespace attnpack
