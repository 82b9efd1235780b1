#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace attnpack {

using Window = std::array<int64_t, 2>;  // {left, right}, inclusive, -1 = unbounded
inline constexpr Window kNoWindow{-1, -1};
using HeadMap = std::optional<std::vector<int64_t>>;

// The rules that say which keys a query attends, and how scores become probabilities. This is their only list: the
// members of ScoreRules, the setters of options, the text of the schemas and the keywords of Python follow from it.
// X(type, name, default, text in a schema). D: head_dim. Hq: query heads.
#define ATTNPACK_SCORE_RULES(X)                                                                          \
  /* Keep keys j <= the query's position. */                                                             \
  X(bool, causal, false, "bool causal=False")                                                            \
  /* Keep keys position - left <= j <= position + right. */                                              \
  X(Window, window, kNoWindow, "int window_left=-1, int window_right=-1")                                \
  /* Keep keys of the query's chunk of so many positions: j / chunk = position / chunk, rounded down. */ \
  X(std::optional<int64_t>, chunk, std::nullopt, "int? chunk=None")                                      \
  /* c > 0: scores become c * tanh(score / c). */                                                        \
  X(double, softcap, 0.0, "float softcap=0.0")                                                           \
  /* One logit per query head that joins the softmax denominator only, [Hq]. */                          \
  X(std::optional<at::Tensor>, sinks, std::nullopt, "Tensor? sinks=None")                                \
  /* Adds -slope * |position - j|, [Hq]. */                                                              \
  X(std::optional<at::Tensor>, alibi_slopes, std::nullopt, "Tensor? alibi_slopes=None")                  \
  /* kv head read by each query head, Hq ints; default h / (Hq / Hkv). */                                \
  X(HeadMap, head_map, std::nullopt, "int[]? head_map=None")                                             \
  /* Dropout on the probabilities. */                                                                    \
  X(double, dropout_p, 0.0, "float dropout_p=0.0")                                                       \
  /* Default 1 / sqrt(D). */                                                                             \
  X(std::optional<double>, scale, std::nullopt, "float? scale=None")

// Rules of single queries. They are applied to the query before an operator sees it (scale_queries), so operators do
// not have them.
#define ATTNPACK_QUERY_RULES(X)                                                                 \
  /* A factor on the scaled scores, before the soft cap: float [Lq] or [B, Lq]; packed: [T]. */ \
  X(std::optional<at::Tensor>, query_scale, std::nullopt, "")

// The text of the rules, which follows the other arguments of a schema.
#define ATTNPACK_RULE_TEXT(type, name, value, text) ", " text
#define ATTNPACK_RULES_SCHEMA ATTNPACK_SCORE_RULES(ATTNPACK_RULE_TEXT)

// A value of each rule. Options and the arguments of operators and layers have them as a base or a member.
struct ScoreRules {
#define ATTNPACK_RULE_MEMBER(type, name, value, text) type name = value;
  ATTNPACK_SCORE_RULES(ATTNPACK_RULE_MEMBER)
  ATTNPACK_QUERY_RULES(ATTNPACK_RULE_MEMBER)
#undef ATTNPACK_RULE_MEMBER

  // Calls f(name, member) with each rule.
  template <class Self, class F>
  static void for_each_rule(Self&& self, F&& f) {
#define ATTNPACK_VISIT_RULE(type, name, value, text) f(#name, self.name);
    ATTNPACK_SCORE_RULES(ATTNPACK_VISIT_RULE)
    ATTNPACK_QUERY_RULES(ATTNPACK_VISIT_RULE)
#undef ATTNPACK_VISIT_RULE
  }

  // The rules without those that say by positions which keys a query attends.
  ScoreRules without_ranges() const {
    ScoreRules rest = *this;
    rest.causal = false;
    rest.window = kNoWindow;
    rest.chunk = std::nullopt;
    return rest;
  }

  // Whether these are the rules of plain attention: no rule but causal and scale is given.
  bool plain() const {
    ScoreRules none;
    none.causal = causal;
    none.scale = scale;
    const auto same = [](const auto& a, const auto& b) {
      if constexpr (std::is_same_v<decltype(a), const std::optional<at::Tensor>&>)
        return a.has_value() == b.has_value();
      else
        return a == b;
    };
#define ATTNPACK_SAME_RULE(type, name, value, text) &&same(name, none.name)
    return true ATTNPACK_SCORE_RULES(ATTNPACK_SAME_RULE) ATTNPACK_QUERY_RULES(ATTNPACK_SAME_RULE);
#undef ATTNPACK_SAME_RULE
  }

  // As ops/detail/schema.h wants them: in the order of the schema.
  auto members() const {
    const auto tie_rule = []<class T>(const T& rule) {
      if constexpr (std::is_same_v<T, Window>)
        return std::tie(rule[0], rule[1]);
      else
        return std::tie(rule);
    };
#define ATTNPACK_TIE_RULE(type, name, value, text) tie_rule(name),
    return [](auto&&... ties) { return std::tuple_cat(ties...); }(ATTNPACK_SCORE_RULES(ATTNPACK_TIE_RULE) std::tie());
#undef ATTNPACK_TIE_RULE
  }
};

// Refuses numbers that are wrong for any input: window, chunk, softcap and scale. wide: of queries in float64.
void check_rule_numbers(const ScoreRules& rules, bool wide);

// Options with the rules among them: options.softcap(30) sets one, options.softcap() reads it.
template <class Options>
class WithScoreRules {
 public:
  const ScoreRules& rules() const { return rules_; }
  Options& rules(ScoreRules rules) {
    rules_ = std::move(rules);
    return static_cast<Options&>(*this);
  }
#define ATTNPACK_RULE_SETTER(type, name, value, text) \
  Options& name(type new_##name) {                    \
    rules_.name = std::move(new_##name);              \
    return static_cast<Options&>(*this);              \
  }                                                   \
  const type& name() const { return rules_.name; }
  ATTNPACK_SCORE_RULES(ATTNPACK_RULE_SETTER)
  ATTNPACK_QUERY_RULES(ATTNPACK_RULE_SETTER)
#undef ATTNPACK_RULE_SETTER

 private:
  ScoreRules rules_;
};

}  // namespace attnpack
