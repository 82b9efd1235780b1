#include <attnpack/distributed/detail/validate.h>

#include <ATen/autocast_mode.h>
#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/names.h>
#include <attnpack/distributed/detail/rules.h>
#include <attnpack/ops/query_scale.h>

namespace attnpack::distributed {

namespace {

// Lets the operator validate the arguments, with no row to compute.
void validate(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
              const AttentionOptions& options, Layout layout) {
  const at::NoGradGuard no_grad;
  check_defined("key", key);
  check_defined("value", value);
  refuse_unshared(options);
  auto local = options;
  if (query.dim() == 4) pieces(layout, query.size(2), group->getSize(), group->getRank(), "query");
  if (key.dim() == 4) pieces(layout, key.size(2), group->getSize(), group->getRank(), "key");
  if (options.kv_lens() && key.dim() == 4) {
    const auto& lens = *options.kv_lens();
    const auto length = key.size(2) * group->getSize();
    if (lens.is_cpu() && lens.numel() > 0) {
      const auto low = lens.min().item<int64_t>(), high = lens.max().item<int64_t>();
      ATTNPACK_CHECK(low >= 0 && high <= length, "kv_lens: got values from ", low, " to ", high, ", want 0 to ", length,
                     ", the length of the whole sequence: give the valid keys of all ranks together");
    }
    local.kv_lens(lens.clamp(0, key.size(2)));
  }
  check_query_scale(query, options.query_scale());
  local.query_scale(std::nullopt);
  attnpack::attention(query.dim() == 4 ? query.narrow(2, 0, 0) : query, key, value, local);
}

}  // namespace

void agree_on_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
                        const AttentionOptions& options, Layout layout, Method method,
                        const std::function<void()>& refuse) {
  std::vector<std::pair<std::string, std::string>> texts{{"query", shown(query)},
                                                         {"key", shown(key)},
                                                         {"value", shown(value)},
                                                         {"layout", name_of(layout)},
                                                         {"method", name_of(method)}};
  const auto rules = rule_texts(options);
  texts.insert(texts.end(), rules.begin(), rules.end());
  agree_on("attention", group, query.device(), texts, [&] {
    refuse();
    validate(query, key, value, group, options, layout);
  });
}

at::Tensor in_autocast(const at::Tensor& x) {
  const auto device = x.device().type();
  const bool on = at::autocast::is_autocast_enabled(device) && x.is_floating_point();
  return on ? x.to(at::autocast::get_autocast_dtype(device)) : x;
}

std::tuple<at::Tensor, at::Tensor> attend_by(Method method, const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const Group& group,
                                             const AttentionOptions& options, Layout layout) {
  const auto attend = method == Method::kAllGather ? attend_gathered
                      : method == Method::kUlysses ? attend_ulysses
                                                   : attend_ring;
  return attend(query, key, value, options, group, layout);
}

}  // namespace attnpack::distributed
