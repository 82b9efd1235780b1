#include <attnpack/distributed/attention.h>

#include <ATen/autocast_mode.h>
#include <attnpack/core/padded.h>
#include <attnpack/distributed/detail/judge.h>
#include <attnpack/ops/query_scale.h>

namespace attnpack::distributed {

namespace {

// x in autocast's dtype where autocast is on: what travels, and what backward sees, has one dtype.
at::Tensor cast(const at::Tensor& x, at::DeviceType device) {
  const bool on = at::autocast::is_autocast_enabled(device) && x.is_floating_point();
  return on ? x.to(at::autocast::get_autocast_dtype(device)) : x;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const Group& group,
                                                      const AttentionOptions& options, Layout layout, Method method) {
  check_defined("query", query);
  check_defined("key", key);
  check_defined("value", value);
  const auto device = query.device().type();
  const auto q = cast(scale_queries(query, options.query_scale()), device), k = cast(key, device),
             v = cast(value, device);
  auto rules = options;
  rules.query_scale(std::nullopt);  // done
  agree_on_attention(q, k, v, group, rules, layout, method);
  return attend_by(method, q, k, v, group, rules, layout);
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
                     const AttentionOptions& options, Layout layout, Method method) {
  return std::get<0>(attention_with_lse(query, key, value, group, options, layout, method));
}

}  // namespace attnpack::distributed
