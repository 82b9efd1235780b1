// Safetensors files: written, read, mapped, and refused.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"
#include "folder.h"
#include "grouped_numbers.h"

#include <attnpack/attnpack.h>
#include <attnpack/weights/detail/shards.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

namespace attnpack {

namespace {

std::string file_of(const std::string& header, size_t bytes) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return text + header + std::string(bytes, '\1');
}

// Whether a file with this header and so many bytes of data is refused with these words.
bool refused(const Folder& folder, const std::string& header, size_t bytes, const std::string& words) {
  const auto path = folder.write("lie.safetensors", file_of(header, bytes));
  return complains(path + ": " + words, [&] { load_safetensors(path); });
}

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return c10::str("\"dtype\":\"", dtype, "\",\"shape\":[", shape, "],\"data_offsets\":[", offsets, "]");
}

}  // namespace

TEST_CASE("tensors of any dtype, strides and sharing come back") {
  torch::manual_seed(0);
  const Folder folder;
  const auto base = torch::randn({4, 6});
  StateDict tensors{{"plain", base},
                    {"again", base},
                    {"transposed", base.t()},
                    {"expanded", base.slice(0, 0, 1).expand({3, 6})},
                    {"part", base.slice(1, 1, 6, 2)},
                    {"number", torch::tensor(3.0)},
                    {"empty", torch::empty({0, 5})},
                    {"trained", torch::randn({3}).requires_grad_()},
                    {"bool", torch::tensor({true, false, true})},
                    {"complex", torch::randn({3}, at::kComplexFloat).conj()},
                    {"\"a\"\n\\\x01 \xc3\xa9", torch::ones({1})}};
  for (const auto type : {at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kShort, at::kInt, at::kLong,
                          at::kUInt16, at::kFloat8_e4m3fn})
    tensors[std::string("of ") + toString(type)] = torch::arange(5).to(type);
  const auto path = folder.path("x.safetensors");
  save_safetensors(tensors, path);
  const auto found = load_safetensors(path);
  REQUIRE(found.size() == tensors.size());
  for (const auto& [name, expected] : tensors) {
    INFO(name);
    const auto& tensor = found.at(name);
    REQUIRE(tensor.scalar_type() == expected.scalar_type());
    REQUIRE(tensor.sizes() == expected.sizes());
    REQUIRE(!tensor.requires_grad());
    const auto bytes = [](const at::Tensor& x) { return x.detach().resolve_conj().contiguous().view(-1); };
    REQUIRE(at::equal(bytes(tensor).view(at::kByte), bytes(expected).view(at::kByte)));
  }
  REQUIRE(folder.names() == std::vector<std::string>{"x.safetensors"});
}

TEST_CASE("loaded tensors are mapped: no copy, and writes stay in the process") {
  const Folder folder;
  const auto path = folder.path("x.safetensors");
  save_safetensors({{"a", torch::ones({1000})}, {"b", torch::zeros({1000})}}, path);
  auto first = load_safetensors(path), second = load_safetensors(path);
  const auto a = first.at("a");
  REQUIRE(static_cast<char*>(first.at("b").data_ptr()) - static_cast<char*>(a.data_ptr()) == 4000);
  first.clear();
  std::filesystem::remove(path);  // the tensors keep what they map
  a.add_(1);
  REQUIRE(at::equal(a, torch::full({1000}, 2.0)));
  REQUIRE(at::equal(second.at("a"), torch::ones({1000})));
}

TEST_CASE("a tensor at an odd byte is copied") {
  const Folder folder;
  const auto header = c10::str("{\"a\":{", tensor("U8", "1", "0,1"), "},\"b\":{", tensor("F32", "1", "1,5"), "}}");
  const auto path = folder.write("x.safetensors", file_of(header + std::string((8 - header.size() % 8) % 8, ' '), 5));
  const auto b = load_safetensors(path).at("b");
  REQUIRE(reinterpret_cast<uintptr_t>(b.data_ptr()) % 4 == 0);
  REQUIRE(b.view(at::kInt).item<int>() == 0x01010101);
}

TEST_CASE("each check refuses its lie, and names the file") {
  const Folder folder;
  const auto one = [](const std::string& text) { return c10::str("{\"a\":{", text, "}}"); };
  const auto two = [](const std::string& text) {
    return c10::str("{\"a\":{", tensor("F32", "2", "0,8"), "},\"b\":{", text, "}}");
  };
  const auto short_file = folder.write("short", "1234567");
  REQUIRE(
      complains(short_file + ": is no whole safetensors file (it has 7 bytes)", [&] { load_safetensors(short_file); }));
  const auto wraps = folder.write("wraps", std::string(8, '\xff') + std::string(8, ' '));
  REQUIRE(complains(wraps + ": is no whole safetensors file (it has 16 bytes)", [&] { load_safetensors(wraps); }));
  REQUIRE(refused(folder, "[]", 0, "is not a safetensors file (Expecting value: the header is no JSON object"));
  REQUIRE(refused(
      folder, two(tensor("F32", "4294967296,4294967296", "8,8")), 8,
      "tensor b has data_offsets [8, 8], but F32 of shape [4294967296, 4294967296] takes more bytes than can be"));
  REQUIRE(refused(folder, two(tensor("F32", "4611686018427387904", "8,8")), 8, "tensor b has data_offsets"));
  REQUIRE(refused(folder, one(tensor("F32", "2", "8,0")), 8,
                  "tensor a has data_offsets [8, 0], but F32 of shape [2] takes 8 bytes"));
  REQUIRE(refused(folder, one(tensor("F32", "2", "0,16")), 8, "tensor a ends at byte 16 of the data, which has 8"));
  REQUIRE(
      refused(folder, one(tensor("F32", "2", "-8,0")), 8, "tensor a is described as {'dtype': 'F32', 'shape': [2]"));
  REQUIRE(refused(folder, one(tensor("F32", "3", "0,8")), 8, "tensor a has data_offsets [0, 8], but F32 of shape [3]"));
  REQUIRE(refused(folder, two(tensor("F32", "1", "4,8")), 8, "its tensors overlap at byte 4 of the data"));
  REQUIRE(refused(folder, two(tensor("F32", "1", "12,16")), 16, "its tensors leave a gap before byte 12 of the data"));
  REQUIRE(refused(folder, one(tensor("F32", "2", "0,8")), 12, "has 4 bytes after its last tensor"));
  REQUIRE(refused(folder, one(tensor("F33", "2", "0,8")), 8, "tensor a has the dtype F33, which is unknown"));
  REQUIRE(refused(folder, "{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ is no object of strings"));
  REQUIRE(refused(folder, "{\"a\":1,\"a\":1}", 0, "is not a safetensors file (a is in an object twice)"));
  REQUIRE(
      refused(folder, one(tensor("F4", "2", "0,1")), 1, "tensor a is F4, which torch does not have; readable are F64"));
  REQUIRE(refused(folder, one(tensor("F32", "0,9223372036854775807,9223372036854775807", "0,0")), 0,
                  "tensor a is empty, and its other sizes are too large"));
  REQUIRE(complains("none: is not a safetensors file (No such file or directory); get",
                    [&] { load_safetensors(folder.path("none")); }));
  REQUIRE(complains(": has neither model.safetensors nor", [&] { load_safetensors(folder.path(".")); }));
  const auto pipe = folder.path("model.safetensors");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  REQUIRE(complains("model.safetensors: is a named pipe, wants a readable file with data: put one in its place",
                    [&] { load_safetensors(folder.path(".")); }));
  REQUIRE(complains(pipe + ": is not a safetensors file (it is a named pipe, wants a readable file with data",
                    [&] { load_safetensors(pipe); }));
}

TEST_CASE("numbers in files and in sentences are the same in every locale of the program") {
  const Folder folder;
  const auto path = folder.path("x.safetensors");
  const auto wide = torch::randn({3, 1024});
  bool said = false;
  {
    const GroupedNumbers german;
    save_safetensors({{"wide", wide}, {"more", torch::ones({2048})}}, path);
    auto bytes = read_bounded(path, 100'000);
    folder.write("cut", bytes.substr(0, bytes.size() - 12'288));
    said = complains("tensor wide ends at byte 20480 of the data, which has 8192; the file is truncated, get it again",
                     [&] { load_safetensors(folder.path("cut")); });
  }
  REQUIRE(said);
  REQUIRE(at::equal(load_safetensors(path).at("wide"), wide));
}

TEST_CASE("shards are read through their index, which must tell the truth") {
  const Folder folder;
  const auto a = torch::ones({2}), b = torch::zeros({3});
  save_safetensors({{"a", a}}, folder.path("1.safetensors"));
  save_safetensors({{"b", b}}, folder.path("2.safetensors"));
  const auto index = [&](const std::string& places) {
    folder.write("model.safetensors.index.json", c10::str("{\"weight_map\":{", places, "}}"));
  };
  index("\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"");
  const auto found = load_safetensors(folder.path("."));
  REQUIRE((found.size() == 2 && at::equal(found.at("a"), a) && at::equal(found.at("b"), b)));
  index("\"a\":\"1.safetensors\",\"b\":\"1.safetensors\"");
  REQUIRE(complains("says that b is in 1.safetensors, which lacks it", [&] { load_safetensors(folder.path(".")); }));
  index("\"a\":\"../1.safetensors\"");
  REQUIRE(complains("names the file '../1.safetensors', wants", [&] { load_safetensors(folder.path(".")); }));
}

TEST_CASE("a saved file replaces a link, and does not follow it") {
  const Folder folder;
  const auto target = folder.write("target", "theirs"), link = folder.path("x.safetensors");
  std::filesystem::create_symlink(target, link);
  save_safetensors({{"a", torch::ones({2})}}, link);
  REQUIRE(!std::filesystem::is_symlink(link));
  REQUIRE(read_bounded(target, 100) == "theirs");
  REQUIRE(at::equal(load_safetensors(link).at("a"), torch::ones({2})));
}

TEST_CASE("a file that cannot be written leaves what was there, and nothing else") {
  const Folder folder;
  const auto path = folder.path("x.safetensors");
  save_safetensors({{"a", torch::ones({2})}}, path);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{20'000, before.rlim_max};
  const auto was = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const bool said = complains(path + ": cannot be written (File too large), and nothing of it is kept",
                              [&] { save_safetensors({{"a", torch::ones({100'000})}}, path); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, was);
  REQUIRE(said);
  REQUIRE(at::equal(load_safetensors(path).at("a"), torch::ones({2})));
  REQUIRE(folder.names() == std::vector<std::string>{"x.safetensors"});
  const auto nowhere = folder.path("none/x.safetensors");
  REQUIRE(complains(nowhere + ": cannot be written (No such file or directory)",
                    [&] { save_safetensors({{"a", torch::ones({2})}}, nowhere); }));
}

TEST_CASE("tensors without numbers are refused by name") {
  const Folder folder;
  const auto path = folder.path("x.safetensors");
  const std::vector<std::pair<std::string, at::Tensor>> wrong = {
      {"got an undefined tensor as a", at::Tensor()},
      {"got a tensor on meta as a", torch::ones({2}, at::kMeta)},
      {"got a sparse tensor as a", torch::ones({2}).to_sparse()},
      {"got a quantised tensor as a", at::quantize_per_tensor(torch::ones({2}), 0.1, 0, at::kQInt8)},
      {"got ComplexDouble as a", torch::ones({2}, at::kComplexDouble)},
  };
  for (const auto& [words, tensor] : wrong)
    REQUIRE(complains(words, [&, &tensor = tensor] { save_safetensors({{"a", tensor}}, path); }));
  REQUIRE(complains("got the name '\\xff', want UTF-8", [&] { save_safetensors({{"\xff", torch::ones({2})}}, path); }));
  const std::vector<std::map<std::string, std::string>> metadata = {{{"a\xff", "b"}}, {{"a", "b\xc3"}}};
  for (const auto& words : metadata)
    REQUIRE(complains("metadata: got ", [&] { save_safetensors({{"a", torch::ones({2})}}, path, words); }));
  REQUIRE(
      complains("got the name __metadata__", [&] { save_safetensors({{"__metadata__", torch::ones({2})}}, path); }));
  REQUIRE(folder.names().empty());
}

}  // namespace attnpack
