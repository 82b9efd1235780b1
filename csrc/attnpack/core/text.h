#pragma once

#include <initializer_list>
#include <locale>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>

// Texts of words and numbers: error sentences, names of tensors, headers of files. Their numbers are those of the
// locale "C". c10::str follows the program's: after std::locale::global(std::locale("de_DE.UTF-8")) it writes 1.024 for
// 1024.
namespace attnpack {

// A part of a text: words, a number, or what else a stream takes. It refers to what it was made of.
class TextPart {
 public:
  TextPart(const char* words) : part_(words), write_(&write_words) {}
  template <typename T>
  TextPart(const T& part) : part_(&part), write_(&write<T>) {}

  void write_to(std::ostream& stream) const { write_(stream, part_); }

 private:
  static void write_words(std::ostream& stream, const void* words) { stream << static_cast<const char*>(words); }
  template <typename T>
  static void write(std::ostream& stream, const void* part) {
    stream << *static_cast<const T*>(part);
  }

  const void* part_;
  void (*write_)(std::ostream& stream, const void* part);
};

// The parts one after the other. They come as a list of one type, so that a call costs little code.
inline std::string text_of(std::initializer_list<TextPart> parts) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  for (const auto& part : parts) part.write_to(stream);
  return std::move(stream).str();
}

// "1, 2, 3"
template <typename List>
std::string joined_by(const char* separator, const List& list) {
  std::string text;
  for (const auto& item : list) text += text_of({text.empty() ? "" : separator, item});
  return text;
}

}  // namespace attnpack
