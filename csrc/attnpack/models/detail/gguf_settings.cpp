#include <attnpack/models/detail/gguf_settings.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <attnpack/models/detail/hf_settings.h>

namespace attnpack {

namespace {

constexpr int64_t kLargestSize = std::numeric_limits<uint32_t>::max();  // as converters write them

// The value of an integer; none for another kind of value, and for one that 63 bits do not hold.
std::optional<int64_t> int_in(const Json& value) {
  const auto* number = value.as<int64_t>();
  return number ? std::optional(*number) : std::nullopt;
}

}  // namespace

GgufSettings::GgufSettings(std::shared_ptr<const GgufFile> file) : file_(std::move(file)) {
  file_->check_model();
  const auto* value = file_->find("general.architecture");
  const auto* name = value ? value->as<std::string>() : nullptr;
  architecture_ = name ? *name : "";
}

const Json& GgufSettings::get(const std::string& key) const {
  static const Json kAbsent;
  const auto* found = file_->find(full(key));
  return found ? *found : kAbsent;
}

bool GgufSettings::is_set(const std::string& key) const { return attnpack::is_set(get(key)); }

bool GgufSettings::is_on(const std::string& key, bool usual) const {
  const auto& value = get(key);
  const auto* on = value.as<bool>();
  check(on || value.is_null(), full(key), " is ", quoted(value), ", wants True or False", kDamaged);
  return on ? *on : usual;
}

bool GgufSettings::is_usual(const std::string& key, bool usual) const {
  const auto& value = get(key);
  const auto* on = value.as<bool>();
  return value.is_null() || (on && *on == usual);
}

const Json& GgufSettings::required(const std::string& key) const {
  check(is_set(key), "metadata lacks ", full(key), ", or it is 0", kDamaged);
  return get(key);
}

int64_t GgufSettings::as_size(const std::string& key, const Json& value) const {
  const auto number = int_in(value);
  const bool large = value.as<uint64_t>() || (number && *number > kLargestSize);
  check(number && *number >= 1 && !large, full(key), " is ", quoted(value), ", wants an int of at least 1",
        large ? text_of({" and at most ", kLargestSize}) : std::string(), kDamaged);
  return *number;
}

int64_t GgufSettings::size(const std::string& key, std::optional<int64_t> usual) const {
  if (!usual) return as_size(key, required(key));
  const auto& value = get(key);
  return as_size(key, value.is_null() ? Json{*usual} : value);
}

std::optional<int64_t> GgufSettings::size_if_set(const std::string& key) const {
  return is_set(key) ? std::optional(size(key)) : std::nullopt;
}

double GgufSettings::number(const std::string& key, std::optional<double> usual) const {
  const auto& value = usual ? get(key) : required(key);
  if (value.is_null()) return *usual;
  const double number = value.as<bool>() ? 0 : number_in(value).value_or(0);
  check(number > 0 && std::isfinite(number), full(key), " is ", quoted(value), ", wants a number above 0", kDamaged);
  return number;
}

std::vector<int64_t> GgufSettings::by_layer(const std::string& key, int64_t layers, std::optional<int64_t> usual,
                                            int64_t least) const {
  const auto& value = get(key);
  const auto* list = value.as<Json::List>();
  if (!list) return std::vector<int64_t>(layers, size(key, usual));
  check(static_cast<int64_t>(list->size()) == layers, full(key), " lists ", list->size(),
        " counts, wants one for each of ", layers, " layers", kDamaged);
  std::vector<int64_t> counts;
  for (const auto& item : *list) {
    const auto number = int_in(item);
    check(number && *number >= least && *number <= kLargestSize, full(key), " is ", quoted(value),
          ", wants ints of at least ", least, kDamaged);
    counts.push_back(*number);
  }
  return counts;
}

std::optional<std::vector<bool>> GgufSettings::bools_by_layer(const std::string& key, int64_t layers, bool more) const {
  const auto& value = get(key);
  const auto* list = value.as<Json::List>();
  if (!list) return std::nullopt;
  std::vector<bool> found;
  for (const auto& item : *list)
    if (const auto* on = item.as<bool>()) found.push_back(*on);
  const auto count = static_cast<int64_t>(list->size());
  check(found.size() == list->size() && (count == layers || (more && count > layers)), full(key), " is ", quoted(value),
        ", wants True or False for each of ", layers, " layers", kDamaged);
  found.resize(layers);
  return found;
}

std::optional<std::vector<double>> GgufSettings::vector(const std::string& name, int64_t length) const {
  if (!file_->has(name)) return std::nullopt;
  const auto& shape = file_->tensor(name).shape;
  check(shape == std::vector<int64_t>{length}, name, " has shape ", at::IntArrayRef(shape), ", RoPE over ", 2 * length,
        " dims asks for [", length, "]", kDamaged);
  const auto numbers = at::empty({length}, at::kFloat);
  file_->read(name, numbers);
  const auto* first = numbers.const_data_ptr<float>();
  return std::vector<double>(first, first + length);
}

void GgufSettings::refuse(const std::vector<std::string>& keys, std::initializer_list<double> usual) const {
  for (const auto& key : keys) {
    const auto& value = get(key);
    const auto number = number_in(value);
    const bool is_usual = number && std::find(usual.begin(), usual.end(), *number) != usual.end();
    if (is_usual || !attnpack::is_set(value)) continue;
    std::string legal;
    for (const double each : usual) legal += text_of({each, " or "});
    check(false, full(key), " = ", quoted(value), " is not supported yet, wants ", legal, "no such key", kOtherModel);
  }
}

bool GgufSettings::some_name_ends_with(std::string_view ending) const {
  return std::any_of(shapes_.begin(), shapes_.end(), [&](const auto& item) { return item.first.ends_with(ending); });
}

}  // namespace attnpack
