#pragma once

#include <cstdint>
#include <string_view>

namespace attnpack {

// The character that begins at text[at], and `at` moved behind it; 0xffffffff, one byte further, where no whole
// character begins. Surrogates, values above U+10FFFF and forms longer than needed are none (Unicode 15, table 3-7).
inline uint32_t next_character(std::string_view text, size_t& at) {
  constexpr uint32_t kNone = 0xffffffff;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t first = byte(at++);
  if (first < 0x80) return first;
  const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
  if (first < 0xc2 || first > 0xf4 || text.size() - at < static_cast<size_t>(more)) return kNone;
  uint32_t code = first & (0x3f >> more);
  for (int i = 0; i < more; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return kNone;
    code = code << 6 | (byte(at + i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0x80, 0x800, 0x10000};
  if (code < kLeast[more - 1] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return kNone;
  at += more;
  return code;
}

inline bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();)
    if (next_character(text, at) == 0xffffffff) return false;
  return true;
}

}  // namespace attnpack
