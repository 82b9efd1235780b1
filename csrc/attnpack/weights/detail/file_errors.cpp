#include <attnpack/weights/detail/file_errors.h>

#include <attnpack/weights/detail/utf8.h>

namespace attnpack {

namespace {

constexpr size_t kLongest = 80;         // characters that an error sentence quotes from a file
constexpr size_t kLongestReason = 500;  // bytes of another error

// Characters that would break or hide a line: control characters, line separators, marks of direction.
bool is_printable(uint32_t code) {
  if (code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xfeff || code == 0xffffffff) return false;
  return !(code >= 0x200b && code <= 0x200f) && !(code >= 0x2028 && code <= 0x202e) &&
         !(code >= 0x2060 && code <= 0x206f);
}

void append_hex(std::string& text, const char* mark, uint32_t code, int digits) {
  text += mark;
  for (int i = digits - 1; i >= 0; --i) text += "0123456789abcdef"[code >> (4 * i) & 0xf];
}

// Up to `most` characters. Those that are not printable, and `also`, become escapes as in Python.
std::string escaped(std::string_view text, size_t most, std::string_view also) {
  std::string result;
  for (size_t at = 0, count = 0; at < text.size() && count < most; ++count) {
    const auto from = at;
    const auto code = next_character(text, at);
    if (code == '\n' || code == '\t' || code == '\r') {
      result += code == '\n' ? "\\n" : code == '\t' ? "\\t" : "\\r";
    } else if (code < 0x80 && also.find(static_cast<char>(code)) != std::string_view::npos) {
      (result += '\\') += static_cast<char>(code);
    } else if (is_printable(code)) {
      result.append(text, from, at - from);
    } else if (code < 0x100 || code == 0xffffffff) {
      append_hex(result, "\\x", static_cast<unsigned char>(text[from]), 2);
    } else {
      append_hex(result, "\\u", code, 4);
    }
  }
  return result;
}

bool all_printable(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    if (!is_printable(next_character(text, at))) return false;
  }
  return true;
}

// The first `count` characters.
std::string_view beginning(std::string_view text, size_t count) {
  size_t at = 0;
  for (; at < text.size() && count > 0; --count) next_character(text, at);
  return text.substr(0, at);
}

}  // namespace

std::string excerpt(std::string_view text) {
  // A character has at most four bytes: no more of a long text decides.
  const auto start = text.substr(0, 4 * (kLongest + 1));
  const auto words = all_printable(start) ? std::string(start) : escaped(text, kLongest, "\\");
  return beginning(words, kLongest).size() == words.size() ? words
                                                           : std::string(beginning(words, kLongest - 3)) + "...";
}

std::string in_quotes(std::string_view text) { return text_of({"'", escaped(text, text.size(), "\\'"), "'"}); }

std::string reason_of(const std::exception& error) {
  if (const auto* system = dynamic_cast<const std::system_error*>(&error)) return system->code().message();
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string words = torch_error ? torch_error->what_without_backtrace() : error.what();
  words = words.substr(0, words.find('\n'));
  const std::string prefix = "attnpack: ";
  if (words.rfind(prefix, 0) == 0) words.erase(0, prefix.size());
  return words.substr(0, kLongestReason);
}

}  // namespace attnpack
