#pragma once

#include <torch/csrc/api/include/torch/arg.h>

#include <type_traits>
#include <utility>

namespace attnpack {

namespace detail {

inline constexpr int kMostOptionLines = 400;

// A line of a header. It converts to all lines before it, best to the nearest. So a call with it finds the last option
// on it or before it.
template <int line>
struct LineUpTo : LineUpTo<line - 1> {
  static constexpr int kLine = line;
};
template <>
struct LineUpTo<0> {};

template <int line>
using OptionLine = std::integral_constant<int, line>;

template <typename Options, int line>
concept HasOptionUpTo = requires { Options::last_option(LineUpTo<line>()); };

// The lines of a header on which Options declares an option, up to `line` and in their order, then `found`.
template <typename Options, int line, int... found>
consteval auto option_lines() {
  if constexpr (HasOptionUpTo<Options, line>) {
    constexpr int last = decltype(Options::last_option(LineUpTo<line>()))::kLine;
    return option_lines<Options, last - 1, last, found...>();
  } else {
    return std::integer_sequence<int, found...>();
  }
}

}  // namespace detail

// The base of a struct of options. An option is declared once, by ATTNPACK_OPTION: torch's TORCH_ARG, which also leaves
// functions that only the number of its line tells from the others. So the list of options follows from the lines.
//
//   struct NormOptions : OptionList<NormOptions> {
//     ATTNPACK_OPTION(double, eps) = 1e-6;
//   };
template <typename Options>
struct OptionList {
  // Calls visit(name, value) with each option, in their order.
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    [&]<int... line>(std::integer_sequence<int, line...>) {
      (Options::visit_option(detail::OptionLine<line>(), self, visit), ...);
    }(detail::option_lines<Options, detail::kMostOptionLines>());
  }
};

#define ATTNPACK_OPTION(T, name) ATTNPACK_OPTION_IF(true, T, name)

// The same for a template; the option is on the list only if the condition holds.
#define ATTNPACK_OPTION_IF(condition, T, name)                                                         \
 public:                                                                                               \
  template <typename Self, typename Visit>                                                             \
    requires(condition)                                                                                \
  static void visit_option(::attnpack::detail::OptionLine<__LINE__>, Self& self, const Visit& visit) { \
    static_assert(__LINE__ < ::attnpack::detail::kMostOptionLines, "raise kMostOptionLines");          \
    visit(#name, self.name##_);                                                                        \
  }                                                                                                    \
  template <typename = void>                                                                           \
    requires(condition)                                                                                \
  static ::attnpack::detail::LineUpTo<__LINE__> last_option(::attnpack::detail::LineUpTo<__LINE__>);   \
  TORCH_ARG(T, name)

}  // namespace attnpack
