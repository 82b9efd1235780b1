#pragma once

#include <c10/util/Exception.h>

#include <attnpack/core/text.h>

#include <string>
#include <string_view>
#include <system_error>

// Errors about files that others made: a c10::ValueError of one sentence that names the file.
namespace attnpack {

// The usual advice: about a checkpoint of several files, and about a file by itself.
inline constexpr const char *kGetAgain = "get the checkpoint again", *kGetFileAgain = "get it again";
// The end of a sentence about a file that contradicts itself, and about one that lacks its end.
inline constexpr const char *kDamaged = "; the file is damaged, get it again",
                            *kTruncated = "; the file is truncated, get it again";
// The end of a sentence about what no model here computes.
inline constexpr const char* kOtherModel = "; give another model";

template <typename... Words>
void refuse_unless(bool condition, const Words&... words) {
  TORCH_CHECK_VALUE(condition, text_of({words...}));
}

// Words from a file, made fit for an error sentence: short, on one line, printable.
std::string excerpt(std::string_view text);

// The words in single quotes, as Python shows a str.
std::string in_quotes(std::string_view text);

// The text of an exception, without the stack of a c10::Error.
std::string reason_of(const std::exception& error);

// Calls `call`. An error that does not begin with `path` becomes a c10::ValueError "PATH: FAILED (the error); FIX". The
// path may also stand in what the error quotes from the file.
template <typename Call>
auto naming(const std::string& path, const char* failed, const char* fix, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    const auto reason = reason_of(error);
    if (dynamic_cast<const c10::ValueError*>(&error) && reason.starts_with(path)) throw;
    TORCH_CHECK_VALUE(false, text_of({path, ": ", failed, " (", reason, "); ", fix}));
  }
}

}  // namespace attnpack
