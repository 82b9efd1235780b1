#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace attnpack::distributed {

// The text of an error of torch or of a backend, without the places of the code that it came through.
inline std::string error_text(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

}  // namespace attnpack::distributed
