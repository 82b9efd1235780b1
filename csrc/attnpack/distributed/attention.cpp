#include <attnpack/distributed/attention.h>

#include <attnpack/core/padded.h>
#include <attnpack/distributed/detail/validate.h>
#include <attnpack/ops/query_scale.h>

namespace attnpack::distributed {

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const Group& group,
                                                      const AttentionOptions& options, Layout layout, Method method) {
  check_defined("query", query);
  check_defined("key", key);
  check_defined("value", value);
  const auto k = in_autocast(key), v = in_autocast(value);
  agree_on_attention(in_autocast(query), k, v, group, options, layout, method);
  const auto q = in_autocast(scale_queries(query, options.query_scale()));
  auto rules = options;
  rules.query_scale(std::nullopt);  // done
  return attend_by(method, q, k, v, group, rules, layout);
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
                     const AttentionOptions& options, Layout layout, Method method) {
  return std::get<0>(attention_with_lse(query, key, value, group, options, layout, method));
}

}  // namespace attnpack::distributed
