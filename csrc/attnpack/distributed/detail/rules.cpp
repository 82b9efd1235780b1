#include <attnpack/distributed/detail/rules.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/sharded_attention.h>

#include <algorithm>
#include <iterator>
#include <string_view>

namespace attnpack::distributed {

namespace {

// The rules that pieces of a sequence follow. Another one is refused.
constexpr std::string_view kSharedRules[] = {"causal",       "window",   "softcap", "sinks",
                                             "alibi_slopes", "head_map", "scale",   "query_scale"};

// A rule as the ranks compare it: a number, or the shape and dtype of a tensor.
template <class T>
std::string text(const T& rule) {
  return text_of({rule});
}
std::string text(const Window& window) { return text_of({window[0], ", ", window[1]}); }
template <class T>
std::string text(const std::optional<T>& number) {
  return number ? text_of({*number}) : "none";
}
std::string text(const std::optional<at::Tensor>& tensor) { return shown(tensor); }
std::string text(const HeadMap& map) { return map ? joined_by(" ", *map) : "none"; }

std::vector<std::pair<std::string, std::string>> texts_of(const ScoreRules& rules) {
  std::vector<std::pair<std::string, std::string>> texts;
  ScoreRules::for_each_rule(rules, [&](const char* name, const auto& rule) { texts.emplace_back(name, text(rule)); });
  return texts;
}

// Lengths on the CPU as the ranks compare them: the numbers too.
std::string numbers(const std::optional<at::Tensor>& lens) {
  if (!lens || !lens->is_cpu()) return text(lens);
  const auto values = lens->to(at::kLong).contiguous();
  return text_of({text(lens), " ", at::IntArrayRef(values.const_data_ptr<int64_t>(), values.numel())});
}

}  // namespace

void refuse_unshared(const AttentionOptions& o) {
  ATTNPACK_CHECK(
      !o.mask(), "mask: got a tensor ", o.mask()->sizes(),
      ", which is not supported over several processes; each rank would need its rows of it: use causal, window "
      "or kv_lens");
  static const auto unset = texts_of(ScoreRules());
  const auto given = texts_of(o.rules());
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& [name, rule] = given[i];
    const bool shared = std::find(std::begin(kSharedRules), std::end(kSharedRules), name) != std::end(kSharedRules);
    ATTNPACK_CHECK(shared || rule == unset[i].second, name, ": got ", rule,
                   ", which is not supported over several processes; leave it out, or attend in one process");
  }
  refuse_named_keys(o.key_index(), o.key_block());
  const auto* offset = std::get_if<int64_t>(&o.q_offset());
  ATTNPACK_CHECK(
      offset && *offset == 0,
      "q_offset: got one, which is not supported over several processes; rows have the positions that the layout "
      "gives them: leave it out");
}

std::vector<std::pair<std::string, std::string>> rule_texts(const AttentionOptions& o) {
  auto texts = texts_of(o.rules());
  texts.emplace_back("kv_lens", numbers(o.kv_lens()));
  return texts;
}

void agree_on(const std::string& what, const Group& group, at::Device device,
              std::vector<std::pair<std::string, std::string>> texts, const std::function<void()>& validate) {
  std::exception_ptr failed;
  try {
    validate();
  } catch (const c10::Error& error) {
    failed = std::current_exception();
    texts.insert(texts.begin(), {"error", error.what_without_backtrace()});
  }
  agree(what, group, device, texts);
  if (failed) std::rethrow_exception(failed);
}

}  // namespace attnpack::distributed
