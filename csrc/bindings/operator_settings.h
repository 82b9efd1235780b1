#pragma once

#include <bindings/keyword_call.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/attention.h>

#include <optional>
#include <string>

namespace attnpack {

// int, tensor [B] or "end".
template <>
struct Reader<QOffset> {
  static std::optional<QOffset> read(const py::handle& value) {
    if (PyLong_CheckExact(value.ptr())) {  // before the slower question whether it is a tensor
      if (const auto number = read_index(value)) return *number;
    }
    check_not_nested("q_offset", value);
    if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
    if (const auto number = read_index(value)) return *number;
    if (py::isinstance<py::str>(value) && value.cast<std::string>() == "end") return End{};
    ATTNPACK_CHECK(false, "q_offset is ", py::repr(value).cast<std::string>(),
                   ", wants an int, an integer tensor [batch] or \"end\"");
  }
  static std::string wanted(const std::string&) { return ""; }
};

// The parameters of a family of functions, for GivenArguments::read.
template <class Visit>
void visit_rules(const Visit& visit, ScoreRules& rules) {
  ScoreRules::for_each_rule(rules, visit);
}

// The operator's arguments beside the tensors and the rules.
struct OperatorSettings {
  std::optional<at::Tensor> mask, kv_lens, key_index;
  QOffset q_offset = int64_t{0};
  int64_t key_block = 1;
  ScoreRules rules;

  template <class Visit>
  void visit(const Visit& visit) {
    visit("q_offset", q_offset);
    visit("kv_lens", kv_lens);
    visit("key_index", key_index);
    visit("key_block", key_block);
    visit_rules(visit, rules);
  }
  AttentionOptions options() const {
    return AttentionOptions()
        .rules(rules)
        .mask(mask)
        .q_offset(q_offset)
        .kv_lens(kv_lens)
        .key_index(key_index)
        .key_block(key_block);
  }
};

// The first result of the call, or both.
template <class Call>
py::object first_or_both(bool both, const Call& call) {
  auto result = without_gil(call);
  return both ? py::cast(std::move(result)) : py::cast(std::get<0>(std::move(result)));
}

}  // namespace attnpack
