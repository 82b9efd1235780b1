#include <attnpack/distributed/detail/rules.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/sharded_attention.h>

namespace attnpack::distributed {

void refuse_unshared(const AttentionOptions& o) {
  ATTNPACK_CHECK(
      !o.mask(), "mask: got a tensor ", o.mask()->sizes(),
      ", which is not supported over several processes; each rank would need its rows of it: use causal, window "
      "or kv_lens");
  ATTNPACK_CHECK(
      o.dropout_p() == 0, "dropout_p: got ", o.dropout_p(),
      ", which is not supported over several processes; each rank would draw other numbers than one process: "
      "train without it");
  refuse_named_keys(o.key_index(), o.key_block());
  refuse_chunk(o.chunk());
  const auto* offset = std::get_if<int64_t>(&o.q_offset());
  ATTNPACK_CHECK(
      offset && *offset == 0,
      "q_offset: got one, which is not supported over several processes; rows have the positions that the layout "
      "gives them: leave it out");
}

namespace {

// A rule as the ranks compare it: a number, or the shape and dtype of a tensor.
template <class T>
std::string text(const T& rule) {
  return c10::str(rule);
}
std::string text(const Window& window) { return c10::str(window[0], ", ", window[1]); }
template <class T>
std::string text(const std::optional<T>& number) {
  return number ? c10::str(*number) : "none";
}
std::string text(const std::optional<at::Tensor>& tensor) { return shown(tensor); }
std::string text(const HeadMap& map) { return map ? c10::Join(" ", *map) : "none"; }

// Lengths on the CPU as the ranks compare them: the numbers too.
std::string numbers(const std::optional<at::Tensor>& lens) {
  if (!lens || !lens->is_cpu()) return text(lens);
  const auto values = lens->to(at::kLong).contiguous();
  return c10::str(text(lens), " ", at::IntArrayRef(values.const_data_ptr<int64_t>(), values.numel()));
}

}  // namespace

std::vector<std::pair<std::string, std::string>> rule_texts(const AttentionOptions& o) {
  std::vector<std::pair<std::string, std::string>> texts;
  ScoreRules::for_each_rule(o.rules(),
                            [&](const char* name, const auto& rule) { texts.emplace_back(name, text(rule)); });
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
