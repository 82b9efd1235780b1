#pragma once

#include <torch/csrc/api/include/torch/arg.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

namespace attnpack {

namespace detail {

template <int line>
using OptionLine = std::integral_constant<int, line>;

inline constexpr int kMostOptionLines = 400;

template <typename Options, int line>
concept OptionAt = requires(const Options& options) { Options::visit_option(OptionLine<line>(), options, 0); };

// The lines of a header on which Options declares an option.
template <typename Options>
consteval auto option_lines() {
  return []<int... line>(std::integer_sequence<int, line...>) {
    constexpr bool found[] = {OptionAt<Options, line>...};
    std::array<int, std::count(std::begin(found), std::end(found), true)> lines{};
    size_t next = 0;
    for (int i = 0; i < kMostOptionLines; ++i)
      if (found[i]) lines[next++] = i;
    return lines;
  }(std::make_integer_sequence<int, kMostOptionLines>());
}

}  // namespace detail

// The base of a struct of options. An option is declared once, by ATTNPACK_OPTION: torch's TORCH_ARG, which also leaves
// a function that only the number of its line tells from the others. So the list of options follows from the lines.
//
//   struct NormOptions : OptionList<NormOptions> {
//     ATTNPACK_OPTION(double, eps) = 1e-6;
//   };
template <typename Options>
struct OptionList {
  // Calls visit(name, value) with each option, in their order.
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    static constexpr auto kLines = detail::option_lines<Options>();
    [&]<size_t... i>(std::index_sequence<i...>) {
      (Options::visit_option(detail::OptionLine<kLines[i]>(), self, visit), ...);
    }(std::make_index_sequence<kLines.size()>());
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
  TORCH_ARG(T, name)

}  // namespace attnpack
