#pragma once

#include <attnpack/distributed/attention.h>

#include <functional>
#include <tuple>

namespace attnpack::distributed {

// Raises on every rank, unless the arguments fit on all of them and are the same. `refuse` may raise too. No row
// is computed.
void agree_on_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
    const AttentionOptions& options, Layout layout, Method method, const std::function<void()>& refuse = [] {});

// x in autocast's dtype where autocast is on: what travels, and what backward sees, has one dtype.
at::Tensor in_autocast(const at::Tensor& x);

// The attention itself, of arguments that the ranks have agreed on.
std::tuple<at::Tensor, at::Tensor> attend_by(Method method, const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const Group& group,
                                             const AttentionOptions& options, Layout layout);

}  // namespace attnpack::distributed
