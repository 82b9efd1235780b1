#include <attnpack/distributed/detail/rules.h>

#include <attnpack/core/check.h>

#include <sstream>

namespace attnpack::distributed {

void refuse_unshared(const AttentionOptions& o) {
  ATTNPACK_CHECK(!o.mask(), "mask: got a tensor ", o.mask()->sizes(),
                 ", which is not done over several processes; each rank would need its rows of it: use causal, window "
                 "or kv_lens");
  ATTNPACK_CHECK(o.dropout_p() == 0, "dropout_p: got ", o.dropout_p(),
                 ", which is not done over several processes; each rank would draw other numbers than one process: "
                 "train without it");
  ATTNPACK_CHECK(!o.key_index(), "key_index: got a tensor ", o.key_index()->sizes(),
                 ", which is not done over several processes; each rank would need its rows of it: name the keys on "
                 "one process");
  const auto* offset = std::get_if<int64_t>(&o.q_offset());
  ATTNPACK_CHECK(offset && *offset == 0,
                 "q_offset: got one, which is not done over several processes; rows have the positions that the layout "
                 "gives them: leave it out");
}

std::vector<std::pair<std::string, std::string>> said_of(const AttentionOptions& o) {
  const auto text = [](const auto& value) {
    std::ostringstream stream;
    stream << value;
    return stream.str();
  };
  std::string map;
  for (const auto head : o.head_map().value_or(std::vector<int64_t>())) map += std::to_string(head) + " ";
  return {{"causal", text(o.causal())},
          {"window", text(o.window()[0]) + ", " + text(o.window()[1])},
          {"softcap", text(o.softcap())},
          {"scale", o.scale() ? text(*o.scale()) : "none"},
          {"sinks", shown(o.sinks())},
          {"alibi_slopes", shown(o.alibi_slopes())},
          {"head_map", map},
          {"kv_lens", o.kv_lens() && o.kv_lens()->is_cpu() ? text(*o.kv_lens()) : shown(o.kv_lens())}};
}

void agree_on(const std::string& what, const Group& group, at::Device device,
              std::vector<std::pair<std::string, std::string>> said, const std::function<void()>& judge) {
  std::exception_ptr failed;
  try {
    judge();
  } catch (const c10::Error& error) {
    failed = std::current_exception();
    said.insert(said.begin(), {"error", error.what_without_backtrace()});
  }
  try {
    agree(what, group, device, said);
  } catch (const c10::ValueError&) {
    if (!failed) throw;
  }
  if (failed) std::rethrow_exception(failed);
}

}  // namespace attnpack::distributed
