#include <attnpack/distributed/detail/agreement.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/collectives.h>

#include <algorithm>
#include <cstdlib>

namespace attnpack::distributed {

namespace {

constexpr int64_t kWidth = 512;

// A row of bytes with as much of the text as goes in, and a number of all of it.
at::Tensor row_of(const std::string& text) {
  const auto row = at::zeros({1, kWidth}, at::kByte);
  const auto number = std::to_string(hash_of(text));
  const auto head = text.substr(0, kWidth - number.size() - 1);
  std::copy(head.begin(), head.end(), row.data_ptr<uint8_t>());
  std::copy(number.begin(), number.end(), row.data_ptr<uint8_t>() + kWidth - number.size());
  return row;
}

std::string text_in(const at::Tensor& row) { return reinterpret_cast<const char*>(row.const_data_ptr<uint8_t>()); }

constexpr char kBetween[] = "; ";

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(kBetween, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 2;
  }
  return parts;
}

// The parts that the other rank has not given.
std::string without(const std::vector<std::string>& parts, const std::vector<std::string>& others) {
  std::string text;
  for (const auto& part : parts) {
    if (std::find(others.begin(), others.end(), part) != others.end()) continue;
    text += (text.empty() ? "" : kBetween) + part;
  }
  return text.empty() ? "none of these" : text;
}

}  // namespace

bool compares(const Group& group, at::Device device) {
  const char* variable = std::getenv("ATTNPACK_CHECK");
  const std::string asked = variable ? variable : "";
  return group->getSize() > 1 && asked != "0" && (device.is_cpu() || asked == "1");
}

std::string shown(const std::optional<at::Tensor>& tensor) {
  if (!tensor || !tensor->defined()) return "none";
  const bool learns = tensor->requires_grad() && at::GradMode::is_enabled();
  return text_of(
      {c10::getDtypeNames(tensor->scalar_type()).first, " ", tensor->sizes(), learns ? ", with gradient" : ""});
}

uint64_t hash_of(std::string_view bytes) {
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

void agree(const std::string& what, const Group& group, at::Device device,
           const std::vector<std::pair<std::string, std::string>>& texts) {
  if (!compares(group, device)) return;
  auto text = what;
  for (const auto& [name, value] : texts) text += kBetween + name + " " + value;
  const auto rows = all_gather(row_of(text).to(device), group).cpu();
  const auto differing = rows.ne(rows[0]).any(1).nonzero().flatten();
  if (differing.numel() == 0) return;
  const auto other = differing[0].item<int64_t>();
  const auto here = parts_of(text_in(rows[0])), there = parts_of(text_in(rows[other]));
  ATTNPACK_CHECK(false, "the ranks of a group give ", what, " different arguments: rank 0 has ", without(here, there),
                 ", rank ", other, " has ", without(there, here),
                 ", want the same on all ranks: give each the same shapes and settings");
}

}  // namespace attnpack::distributed
