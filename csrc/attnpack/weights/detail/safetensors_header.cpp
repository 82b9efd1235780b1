#include <algorithm>
#include <utility>

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/safetensors_file.h>

namespace attnpack {

namespace {

using Text = std::string;

void check_metadata(const std::string& path, const Json& metadata) {
  const auto* words = metadata.as<Json::Object>();
  const bool fine = metadata.is_null() || (words && std::all_of(words->begin(), words->end(), [](const auto& word) {
                                             return word.value.template as<Text>();
                                           }));
  refuse_unless(fine, path, ": __metadata__ is no object of strings", kDamaged);
}

// A list of sizes or offsets; none if the value is another.
std::optional<std::vector<uint64_t>> read_numbers(const Json* value) {
  const auto* list = value ? value->as<Json::List>() : nullptr;
  if (!list) return std::nullopt;
  std::vector<uint64_t> numbers;
  for (const auto& item : *list) {
    const auto* small = item.as<int64_t>();
    const auto* large = item.as<uint64_t>();
    if (!large && (!small || *small < 0)) return std::nullopt;
    numbers.push_back(large ? *large : static_cast<uint64_t>(*small));
  }
  return numbers;
}

// The dtype's name: a text or, as Rust reads it too, {"F32": null}.
const std::string* read_dtype(const Json* value) {
  const auto* object = value ? value->as<Json::Object>() : nullptr;
  if (object && object->size() == 1 && object->front().value.is_null()) return &object->front().name;
  return value ? value->as<Text>() : nullptr;
}

// Bits that a tensor takes; none if a product on the way needs more than 64 bits.
std::optional<uint64_t> bits_of(const StoredDtype& dtype, const std::vector<uint64_t>& shape) {
  uint64_t bits = 1;
  const auto multiply = [&](uint64_t size) { return !__builtin_mul_overflow(bits, size, &bits); };
  return std::all_of(shape.begin(), shape.end(), multiply) && multiply(dtype.bits) ? std::make_optional(bits)
                                                                                   : std::nullopt;
}

std::string listed(const std::vector<uint64_t>& numbers) {
  Json::List list;
  for (const auto number : numbers) list.push_back({number});
  return shown({std::move(list)});
}

std::string bytes_of(uint64_t bits) {
  static constexpr const char* kRests[] = {"", ".125", ".25", ".375", ".5", ".625", ".75", ".875"};
  return std::to_string(bits / 8) + kRests[bits % 8] + " bytes";
}

StoredTensor read_entry(const std::string& path, const std::string& name, const Json& entry, uint64_t size) {
  // A list of the three values is what Rust's reader takes for an object too.
  const auto* list = entry.as<Json::List>();
  const auto value_of = [&](const char* key, size_t place) {
    return !list ? entry.find(key) : list->size() == 3 ? &(*list)[place] : nullptr;
  };
  const auto* word = read_dtype(value_of("dtype", 0));
  auto shape = read_numbers(value_of("shape", 1));
  const auto offsets = read_numbers(value_of("data_offsets", 2));
  refuse_unless(word && shape && offsets && offsets->size() == 2, path, ": tensor ", name, " is described as ",
                quoted(entry), ", not by dtype, shape and two data_offsets", kDamaged);

  const auto* dtype = std::find_if(std::begin(kStoredDtypes), std::end(kStoredDtypes),
                                   [&](const StoredDtype& known) { return known.name == *word; });
  refuse_unless(dtype != std::end(kStoredDtypes), path, ": tensor ", name, " has the dtype ", excerpt(*word),
                ", which is unknown; ", kGetAgain);
  const auto begin = (*offsets)[0], end = (*offsets)[1];
  refuse_unless(end <= size, path, ": tensor ", name, " ends at byte ", end, " of the data, which has ", size,
                kTruncated);
  const auto bits = bits_of(*dtype, *shape);
  // end - begin is no more than the file's size, so its bits fit.
  refuse_unless(bits && begin <= end && 8 * (end - begin) == *bits, path, ": tensor ", name, " has data_offsets ",
                listed(*offsets), ", but ", dtype->name, " of shape ", excerpt(listed(*shape)), " takes ",
                bits ? bytes_of(*bits) : "more bytes than can be", kDamaged);
  return {dtype, std::move(*shape), begin, end};
}

// Raises unless the tensors lie one after the other and fill the data.
void check_cover(const std::string& path, const std::map<std::string, StoredTensor>& tensors, uint64_t size) {
  std::vector<std::pair<uint64_t, uint64_t>> places;
  for (const auto& [name, tensor] : tensors) places.emplace_back(tensor.begin, tensor.end);
  std::sort(places.begin(), places.end());
  uint64_t end = 0;
  for (const auto& [first, last] : places) {
    refuse_unless(first == end, path, ": its tensors ", first < end ? "overlap at" : "leave a gap before", " byte ",
                  first, " of the data", kDamaged);
    end = last;
  }
  refuse_unless(end == size, path, ": has ", size - end,
                " bytes after its last tensor; the file is damaged, or another was appended to it: ", kGetFileAgain);
}

}  // namespace

void check_tensor_count(const std::string& path, int64_t count) {
  refuse_unless(count <= kMostTensors, path, ": describes ", count, " tensors, where ", kMostTensors, " are the most; ",
                kGetAgain);
}

std::map<std::string, StoredTensor> read_safetensors_header(const std::string& path, const Json& header,
                                                            uint64_t size) {
  const auto& entries = *header.as<Json::Object>();
  const auto* metadata = header.find("__metadata__");
  if (metadata) check_metadata(path, *metadata);
  check_tensor_count(path, entries.size() - (metadata ? 1 : 0));
  std::map<std::string, StoredTensor> tensors;
  for (const auto& [name, entry] : entries) {
    if (&entry != metadata) tensors.emplace(name, read_entry(path, excerpt(name), entry, size));
  }
  check_cover(path, tensors, size);
  return tensors;
}

}  // namespace attnpack
