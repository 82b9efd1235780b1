#pragma once

#include <exception>
#include <string>

namespace attnpack {

// Whether f raises with these words. (The matchers of Catch2 2 and 3 have different names.)
template <typename F>
bool complains(const std::string& words, const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return std::string(error.what()).find(words) != std::string::npos;
  }
  return false;
}

}  // namespace attnpack
