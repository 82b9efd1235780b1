#include <attnpack/weights/detail/gguf_header.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/utf8.h>

namespace attnpack {

namespace {

constexpr uint64_t kMostGgufKeys = 1 << 16, kMostGgufTensors = 1 << 16;
constexpr uint64_t kArrayCost = 10;         // of an array in an array, in items
constexpr uint32_t kMostGgufDims = 4;       // as in ggml
constexpr int kDeepestArray = 16;           // arrays in arrays
constexpr uint64_t kHeaderPiece = 1 << 20;  // bytes of the header that are read at a time

// The types of metadata.
struct MetadataKind {
  enum : uint32_t {
    kUint8,
    kInt8,
    kUint16,
    kInt16,
    kUint32,
    kInt32,
    kFloat32,
    kBool,
    kString,
    kArray,
    kUint64,
    kInt64,
    kFloat64,
  };
};
template <typename T>
T value_at(const char* from) {
  T number;
  std::memcpy(&number, from, sizeof(T));
  return number;
}

// Bytes of a value of fixed size; 0 for the others.
uint64_t size_of_kind(uint32_t kind) {
  switch (kind) {
    case MetadataKind::kUint8:
    case MetadataKind::kInt8:
    case MetadataKind::kBool:
      return 1;
    case MetadataKind::kUint16:
    case MetadataKind::kInt16:
      return 2;
    case MetadataKind::kUint32:
    case MetadataKind::kInt32:
    case MetadataKind::kFloat32:
      return 4;
    case MetadataKind::kUint64:
    case MetadataKind::kInt64:
    case MetadataKind::kFloat64:
      return 8;
    default:
      return 0;
  }
}

// A value of fixed size.
Json scalar_at(const char* from, uint32_t kind) {
  const auto integer = [](auto number) { return Json{static_cast<int64_t>(number)}; };
  switch (kind) {
    case MetadataKind::kUint8:
      return integer(value_at<uint8_t>(from));
    case MetadataKind::kInt8:
      return integer(value_at<int8_t>(from));
    case MetadataKind::kUint16:
      return integer(value_at<uint16_t>(from));
    case MetadataKind::kInt16:
      return integer(value_at<int16_t>(from));
    case MetadataKind::kUint32:
      return integer(value_at<uint32_t>(from));
    case MetadataKind::kInt32:
      return integer(value_at<int32_t>(from));
    case MetadataKind::kFloat32:
      return {static_cast<double>(value_at<float>(from))};
    case MetadataKind::kBool:
      return {value_at<uint8_t>(from) != 0};
    case MetadataKind::kInt64:
      return integer(value_at<int64_t>(from));
    case MetadataKind::kFloat64:
      return {value_at<double>(from)};
    default: {
      const auto number = value_at<uint64_t>(from);
      return number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ? Json{number} : integer(number);
    }
  }
}

// How many bytes at `at`, where no whole character stands, a character could begin with: at least 1.
size_t broken_bytes(std::string_view text, size_t at) {
  size_t longest = 1;
  for (size_t count = 2; count < 4 && at + count <= text.size(); ++count) {
    if ((static_cast<unsigned char>(text[at + count - 1]) & 0xc0) != 0x80) break;
    for (const char* end : {"\x80", "\x80\x80"}) {
      const auto whole = std::string(text.substr(at, count)) + end;
      size_t next = 0;
      if (next_character(whole, next) != 0xffffffff && next == whole.size()) longest = count;
    }
  }
  return longest;
}

// The text with U+FFFD in the place of what is no UTF-8, as Python's errors="replace" has it.
std::string as_utf8(std::string_view text) {
  if (is_utf8(text)) return std::string(text);
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const auto from = at;
    if (next_character(text, at) != 0xffffffff) {
      result += text.substr(from, at - from);
    } else {
      result += "\xef\xbf\xbd";
      at = from + broken_bytes(text, from);
    }
  }
  return result;
}

// b'...': bytes as Python shows them.
std::string shown_bytes(std::string_view bytes) {
  std::string text = "b'";
  for (const char each : bytes) {
    const auto byte = static_cast<unsigned char>(each);
    if (byte == '\n' || byte == '\t' || byte == '\r') {
      text += byte == '\n' ? "\\n" : byte == '\t' ? "\\t" : "\\r";
    } else if (byte < 0x20 || byte > 0x7e) {
      text += {'\\', 'x', "0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
    } else {
      if (byte == '\\' || byte == '\'') text += '\\';
      text += each;
    }
  }
  return text + "'";
}

// Reads values one after the other, and raises at the end of the file and at the limits of a header.
class GgufReader {
 public:
  GgufReader(const std::string& path, const File& file) : path_(path), file_(file) {}

  uint64_t at() const { return at_; }

  // The next bytes, until more are taken. A header has millions of small values: the file is read in pieces.
  std::string_view take(uint64_t count) {
    if (count > piece_.size() - next_) {
      check_left(count);
      piece_.erase(0, next_);
      next_ = 0;
      const auto there = piece_.size();
      piece_.resize(std::min(std::max(count, kHeaderPiece), file_.size() - at_));
      file_.read_at(at_ + there, piece_.data() + there, piece_.size() - there);
    }
    const std::string_view taken(piece_.data() + next_, count);
    next_ += count;
    at_ += count;
    return taken;
  }

  template <typename T>
  T number() {
    return value_at<T>(take(sizeof(T)).data());
  }

  uint64_t count(uint64_t most, const char* unit) {
    const auto count = number<uint64_t>();
    check_at_most(count, most, unit);
    return count;
  }

  // Strictly decoded: as replaced characters, two names that are not UTF-8 could become the same.
  std::string name() {
    const auto bytes = take(number<uint64_t>());
    refuse_unless(is_utf8(bytes), "the name ", excerpt(bytes), " is no UTF-8");
    return std::string(bytes);
  }

  Json value(uint32_t kind, int depth = 0) {
    if (kind == MetadataKind::kString) return {as_utf8(take(number<uint64_t>()))};
    if (kind == MetadataKind::kArray) return {array(depth)};
    refuse_unless(size_of_kind(kind) > 0, path_, ": metadata of type ", kind, ", which GGUF does not define", kDamaged);
    return scalar_at(take(size_of_kind(kind)).data(), kind);
  }

 private:
  Json::List array(int depth) {
    refuse_unless(depth < kDeepestArray, path_, ": metadata with arrays in arrays, ", depth, " deep", kDamaged);
    const auto kind = number<uint32_t>();
    const auto cost = kind == MetadataKind::kArray ? kArrayCost : 1;
    const auto size = count((kMostGgufItems - items_) / cost, "values in arrays");
    items_ += size * cost;
    Json::List list;
    if (const auto bytes = size_of_kind(kind)) {
      const auto* from = take(size * bytes).data();
      list.reserve(size);
      for (uint64_t i = 0; i < size; ++i) list.push_back(scalar_at(from + i * bytes, kind));
    } else {
      for (uint64_t i = 0; i < size; ++i) list.push_back(value(kind, depth + 1));
    }
    return list;
  }

  // Raises unless the file has so many more bytes.
  void check_left(uint64_t count) const {
    refuse_unless(count <= file_.size() - at_, path_, ": the GGUF header ends early (the file has ", file_.size(),
                  " bytes); the file is damaged or truncated, ", kGetFileAgain);
    check_at_most(at_ + count, kLongestGgufHeader, "bytes");
  }

  void check_at_most(uint64_t count, uint64_t most, const char* unit) const {
    refuse_unless(count <= most, path_, ": the GGUF header has ", count, " ", unit, ", where ", most, " are the most",
                  kDamaged);
  }

  const std::string& path_;
  const File& file_;
  uint64_t at_ = 0, items_ = 0;
  std::string piece_;  // of the file, of which `next_` bytes are read
  size_t next_ = 0;
};

uint64_t checked_alignment(const std::string& path, uint32_t kind, const Json& value) {
  const auto* number = value.as<int64_t>();
  refuse_unless(kind == MetadataKind::kUint32 && std::has_single_bit(static_cast<uint64_t>(*number)), path,
                ": general.alignment is ", quoted(value), " (type ", kind, "), wants a uint32 that is a power of two",
                kDamaged);
  return *number;
}

GgufHeader::Tensor read_tensor(const std::string& path, GgufReader& reader) {
  GgufHeader::Tensor tensor{reader.name(), {}, 0, 0};
  const auto dims = reader.number<uint32_t>();
  refuse_unless(dims >= 1 && dims <= kMostGgufDims, path, ": tensor ", excerpt(tensor.name), " has ", dims,
                " dims, wants 1 to ", kMostGgufDims, kDamaged);
  for (uint32_t i = 0; i < dims; ++i) tensor.shape.push_back(reader.number<uint64_t>());
  std::reverse(tensor.shape.begin(), tensor.shape.end());
  tensor.type = reader.number<uint32_t>();
  tensor.at = reader.number<uint64_t>();
  return tensor;
}

}  // namespace

GgufHeader read_gguf_header(const std::string& path, const File& file) {
  GgufReader reader(path, file);
  const auto magic = reader.take(std::min<uint64_t>(4, file.size()));
  refuse_unless(magic == "GGUF", path, ": begins with ", shown_bytes(magic), ", not with b'GGUF'; give a GGUF file");
  const auto version = reader.number<uint32_t>();
  refuse_unless(version == 2 || version == 3, path, ": GGUF version ", version,
                "; readable are little-endian versions 2 and 3: convert the model again, or get another file of it");
  const auto num_tensors = reader.count(kMostGgufTensors, "tensors"), num_keys = reader.count(kMostGgufKeys, "keys");
  GgufHeader header;
  std::set<std::string> keys;
  for (uint64_t i = 0; i < num_keys; ++i) {
    const auto begin = reader.at();
    auto key = reader.name();
    const auto kind = reader.number<uint32_t>();
    refuse_unless(keys.insert(key).second, path, ": has the key ", excerpt(key), " twice", kDamaged);
    auto value = reader.value(kind);
    if (key == "general.alignment") header.alignment = checked_alignment(path, kind, value);
    header.metadata.push_back({std::move(key), std::move(value)});
    header.places.push_back({begin, reader.at()});
  }
  for (uint64_t i = 0; i < num_tensors; ++i) header.tensors.push_back(read_tensor(path, reader));
  header.end = reader.at();
  return header;
}

}  // namespace attnpack
