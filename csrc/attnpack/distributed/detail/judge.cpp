#include <attnpack/distributed/detail/judge.h>

#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/rules.h>

namespace attnpack::distributed {

namespace {

const char* name_of(Method method) {
  return method == Method::kAllGather ? "kAllGather" : method == Method::kUlysses ? "kUlysses" : "kRing";
}

// Lets the operator judge the arguments, with no row to compute.
void judge(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
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
    ATTNPACK_CHECK(lens.numel() == 0 || !lens.is_cpu() ||
                       (lens.min().item<int64_t>() >= 0 && lens.max().item<int64_t>() <= length),
                   "kv_lens: got ", lens, ", want values from 0 to ", length,
                   ", the length of the whole sequence: give the valid keys of all ranks together");
    local.kv_lens(lens.clamp(0, key.size(2)));
  }
  attnpack::attention(query.dim() == 4 ? query.narrow(2, 0, 0) : query, key, value, local);
}

}  // namespace

void agree_on_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Group& group,
                        const AttentionOptions& options, Layout layout, Method method,
                        const std::function<void()>& refuse) {
  std::vector<std::pair<std::string, std::string>> said{
      {"query", shown(query)},
      {"key", shown(key)},
      {"value", shown(value)},
      {"layout", layout == Layout::kZigzag ? "kZigzag" : "kContiguous"},
      {"method", name_of(method)}};
  const auto rules = said_of(options);
  said.insert(said.end(), rules.begin(), rules.end());
  agree_on("attention", group, query.device(), said, [&] {
    refuse();
    judge(query, key, value, group, options, layout);
  });
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
