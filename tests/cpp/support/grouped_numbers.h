#pragma once

#include <locale>
#include <string>

namespace attnpack {

// While it lives, the program's locale writes 1.024 for 1024, as a German one does.
class GroupedNumbers {
 public:
  GroupedNumbers() : before_(std::locale::global(std::locale(std::locale::classic(), new Dots))) {}
  ~GroupedNumbers() { std::locale::global(before_); }
  GroupedNumbers(const GroupedNumbers&) = delete;

 private:
  struct Dots : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };

  std::locale before_;
};

}  // namespace attnpack
