// GGUF files: their metadata, their numbers, their blocks, and what is refused.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"
#include "folder.h"
#include "gguf_bytes.h"

#include <attnpack/ops/stored_linear.h>
#include <attnpack/weights/detail/gguf_file.h>

#include <sys/stat.h>

#include <cmath>

namespace attnpack {

namespace {

constexpr uint32_t kF16 = 1, kQ4_0 = 2, kQ8_0 = 8, kQ2_K = 10, kF64 = 28, kBF16 = 30, kMXFP4 = 39;
constexpr uint32_t kUint16Key = 2, kInt8Key = 1, kStringKey = 8, kArrayKey = 9, kUint64Key = 10, kFloat64Key = 12;

std::string raw(const at::Tensor& tensor) {
  const auto whole = tensor.contiguous();
  return {static_cast<const char*>(whole.data_ptr()), whole.nbytes()};
}

bool gguf_refused(const Folder& folder, const std::string& bytes, const std::string& words) {
  const auto path = folder.write("lie.gguf", bytes);
  return complains(path + ": " + words, [&] { GgufFile{path}; });
}

at::Tensor numbers_of(const GgufFile& file, const std::string& name, std::vector<int64_t> shape) {
  const auto out = at::empty(shape);
  file.read(name, out);
  return out;
}

}  // namespace

TEST_CASE("metadata of a GGUF file keep their kinds and their order") {
  const Folder folder;
  GgufBytes bytes;
  const auto item = [](const std::string& words) { return GgufBytes::text(words); };
  const auto number = [](auto value) { return GgufBytes::bytes_of(value); };
  const auto list = [&](uint32_t kind, uint64_t count) { return number(kind) + number(count); };
  bytes.add("z", 7U).add("a", true).add("f", 0.5F).add("text", "words");
  bytes.add("negative", kInt8Key, number(int8_t{-3})).add("huge", kUint64Key, number(~uint64_t{0}));
  bytes.add("not a number", kFloat64Key, number(std::nan("")));
  bytes.add("texts", kArrayKey, list(kStringKey, 2) + item("x") + item("\xe4\xb8\xff\xf0\x9f\x98"));
  bytes.add("lists", kArrayKey, list(kArrayKey, 1) + list(kUint16Key, 2) + number(uint16_t{1}) + number(uint16_t{2}));
  const GgufFile file(folder.write("x.gguf", bytes.bytes()));
  std::string shown_all;
  for (const auto& [name, value] : file.metadata()) shown_all += name + "=" + shown(value) + " ";
  REQUIRE(shown_all ==
          "z=7 a=True f=0.5 text='words' negative=-3 huge=18446744073709551615 not a number=nan "
          "texts=['x', '\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd'] lists=[[1, 2]] ");
  REQUIRE(*file.find("huge")->as<uint64_t>() == ~uint64_t{0});
  REQUIRE(!file.find("y"));
  REQUIRE(file.metadata_places().size() == file.metadata().size());
  REQUIRE(file.metadata_places()[1].end - file.metadata_places()[1].begin == 8 + 1 + 4 + 1);
}

TEST_CASE("numbers of GGUF tensors come in any dtype, whole and in rows") {
  torch::manual_seed(0);
  const Folder folder;
  const auto plain = torch::randn({3, 40}), vector = torch::randn({70});
  const auto wide = torch::randn({5, 64}, at::kDouble);
  const auto eight = to_stored(torch::randn({700, 512}), 8), four = to_stored(torch::randn({2, 64}), 4);
  // A block of MXFP4 with the scale 2, and one with the exponents 1 and 255, which OCP's MXFP4 has not.
  std::string tiny(1, '\x80'), small(1, '\1'), large(1, '\xff');
  for (int i = 0; i < 16; ++i) tiny += static_cast<char>(i | (15 - i) << 4);
  small += std::string(16, '\x29'), large += std::string(16, '\x12');
  GgufBytes bytes;
  bytes.add_tensor("plain", plain).add_tensor("vector", vector);
  bytes.add_tensor("half", {3, 40}, kF16, raw(plain.to(at::kHalf)));
  bytes.add_tensor("brain", {3, 40}, kBF16, raw(plain.to(at::kBFloat16)));
  bytes.add_tensor("double", {5, 64}, kF64, raw(wide));
  bytes.add_tensor("eight", {700, 512}, kQ8_0, raw(eight)).add_tensor("four", {2, 64}, kQ4_0, raw(four));
  bytes.add_tensor("mx", {3, 32}, kMXFP4, tiny + small + large);
  const GgufFile file(folder.write("x.gguf", bytes.bytes()));
  REQUIRE(file.names().front() == "plain");
  REQUIRE(file.tensor("eight").row_bytes == 512 / 32 * 34);
  REQUIRE(at::equal(numbers_of(file, "plain", {3, 40}), plain));
  REQUIRE(at::equal(numbers_of(file, "half", {3, 40}), plain.to(at::kHalf).to(at::kFloat)));
  REQUIRE(at::equal(numbers_of(file, "brain", {3, 40}), plain.to(at::kBFloat16).to(at::kFloat)));
  REQUIRE(at::equal(numbers_of(file, "double", {5, 64}), wide.to(at::kFloat)));
  const auto all = widen_stored(eight, at::kFloat);
  REQUIRE(at::equal(numbers_of(file, "eight", {700, 512}), all));  // more than one piece
  REQUIRE(at::equal(numbers_of(file, "four", {2, 64}), widen_stored(four, at::kFloat)));
  const auto part = at::empty({600, 512}, at::kBFloat16);
  file.read("eight", part, 100);
  REQUIRE(at::equal(part, all.narrow(0, 100, 600).to(at::kBFloat16)));
  const auto middle = at::empty({9});
  file.read("vector", middle, 20);
  REQUIRE(at::equal(middle, vector.narrow(0, 20, 9)));
  REQUIRE(complains("has 700 rows, not 600 from row 101 on", [&] { file.read("eight", part, 101); }));

  const auto mx = numbers_of(file, "mx", {3, 32});
  const std::vector<float> e2m1{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int i = 0; i < 16; ++i) {
    const auto expected = 2 * (i < 8 ? e2m1[i] : -e2m1[i - 8]);
    REQUIRE(mx[0][i].item<float>() == expected);
    REQUIRE(mx[0][31 - i].item<float>() == expected);
  }
  REQUIRE(mx[1][0].item<float>() == -0x1p-127F);  // code 9
  REQUIRE(mx[1][16].item<float>() == 0x1p-126F);  // code 2
  REQUIRE(std::isinf(mx[2][0].item<float>()));
  REQUIRE(mx[2][16].item<float>() == 0x1p127F);
}

TEST_CASE("blocks of GGUF tensors stay as they are") {
  torch::manual_seed(0);
  const Folder folder;
  const auto eight = to_stored(torch::randn({6, 64}), 8);
  auto damaged = eight.clone();
  damaged[4][1][1] = 0x7c;  // an infinite scale
  GgufBytes bytes;
  bytes.add_tensor("good", {2, 3, 64}, kQ8_0, raw(eight)).add_tensor("damaged", {6, 64}, kQ8_0, raw(damaged));
  bytes.add_tensor("vector", {64}, kQ8_0, raw(eight[0])).add_tensor("plain", torch::ones({2, 2}));
  const auto path = folder.write("x.gguf", bytes.bytes());
  std::optional<at::Tensor> kept;
  {
    const GgufFile file(path);
    REQUIRE(!file.blocks("vector", 0, 1));
    REQUIRE(!file.blocks("plain", 0, 1));
    REQUIRE(at::equal(*file.blocks("damaged", 0, 4), damaged.narrow(0, 0, 4)));
    REQUIRE(complains(path + ": tensor damaged has a scale that is not finite", [&] { file.blocks("damaged", 4, 1); }));
    REQUIRE(complains("has 6 rows, not 2 from row 5 on", [&] { file.blocks("good", 5, 2); }));
    kept = file.blocks("good", 3, 3);
  }
  REQUIRE(at::equal(*kept, eight.narrow(0, 3, 3)));  // the file stays mapped while they live
}

TEST_CASE("a type that is none of C++'s is read by what is given") {
  const Folder folder;
  const auto path = folder.write("x.gguf", GgufBytes().add_tensor("x", {2, 8}, kQ2_K, std::string(6, '\7')).bytes());
  REQUIRE(
      complains(path + ": has tensors of type Q2_K, which C++ does not widen: Python may", [&] { GgufFile{path}; }));
  GgufOtherTypes others;
  others.block = [](uint32_t) { return std::pair<uint64_t, uint64_t>(8, 3); };
  others.widen = [](uint32_t type, const at::Tensor& bytes) {
    return bytes.to(at::kFloat).sum(-1, true).add(type).repeat({1, 8});
  };
  const GgufFile file(path, others);
  REQUIRE(file.tensor("x").row_bytes == 3);
  REQUIRE(at::equal(numbers_of(file, "x", {2, 8}), torch::full({2, 8}, 31.0)));
  REQUIRE(!file.blocks("x", 0, 2));
  others.block = [](uint32_t) -> std::pair<uint64_t, uint64_t> { throw std::runtime_error("as it is"); };
  REQUIRE(complains("as it is", [&] { GgufFile(path, others); }));
}

TEST_CASE("GGUF files that lie are refused by a sentence") {
  const Folder folder;
  const auto ones = std::string(64, '\1');
  const auto tensor = [&](std::vector<int64_t> shape, uint32_t type) {
    return GgufBytes().add_tensor("x", std::move(shape), type, ones).bytes();
  };
  REQUIRE(gguf_refused(folder, "", "begins with b'', not with b'GGUF'; give a GGUF file"));
  REQUIRE(gguf_refused(folder, "GG\xff'\n", "begins with b'GG\\xff\\'', not with b'GGUF'"));
  REQUIRE(gguf_refused(folder, "GGUF\4", "the GGUF header ends early (the file has 5 bytes)"));
  REQUIRE(gguf_refused(folder, "GGUF" + std::string(20, '\1'), "GGUF version 16843009"));
  REQUIRE(
      gguf_refused(folder, tensor({int64_t{1} << 62, 4}, 0), "tensor x ends at byte 18446744073709551615 or later"));
  REQUIRE(gguf_refused(folder, tensor({17}, 0), "tensor x ends at byte 132, but the file has 128"));
  REQUIRE(gguf_refused(folder, tensor({0, -1}, 0), "tensor x has a size of 18446744073709551615"));
  REQUIRE(gguf_refused(folder, tensor({33}, kQ8_0), "tensor x has rows of 33, which its type stores in blocks of 32"));
  REQUIRE(gguf_refused(folder, tensor({1}, 99), "has tensors of type 99, which is unknown here; use a file of"));
  REQUIRE(gguf_refused(folder, tensor({1}, 77), "has tensors of type 77, which is unknown here; use a file of"));
  REQUIRE(gguf_refused(folder, tensor({1}, 4), "has tensors of type 4, which ggml has removed; use a file of"));
  REQUIRE(gguf_refused(folder, tensor({}, 0), "tensor x has 0 dims, wants 1 to 4"));
  REQUIRE(gguf_refused(folder, tensor({1, 1, 1, 1, 1}, 0), "tensor x has 5 dims, wants 1 to 4"));
  REQUIRE(gguf_refused(folder, GgufBytes().add("k\xff", 1U).bytes(), "is no GGUF file that can be read (the name"));
  REQUIRE(gguf_refused(folder, GgufBytes().add("k", 1U).add("k", 1U).bytes(), "has the key k twice"));
  REQUIRE(gguf_refused(folder, GgufBytes().add("k", 13, "").bytes(), "metadata of type 13"));
  const auto aligned = [](uint32_t to) { return GgufBytes().add("general.alignment", to).bytes(); };
  REQUIRE(gguf_refused(folder, aligned(0), "general.alignment is 0 (type 4)"));
  REQUIRE(gguf_refused(folder, aligned(48), "general.alignment is 48 (type 4)"));
  const auto list = [](uint32_t kind, uint64_t count) {
    return GgufBytes::bytes_of(kind) + GgufBytes::bytes_of(count);
  };
  REQUIRE(gguf_refused(folder, GgufBytes().add("k", kArrayKey, list(kStringKey, 3'000'001)).bytes(),
                       "the GGUF header has 3000001 values in arrays, where 3000000 are the most"));
  REQUIRE(gguf_refused(folder, GgufBytes().add("k", kArrayKey, list(kArrayKey, 300'001)).bytes(),
                       "the GGUF header has 300001 values in arrays, where 300000 are the most"));
  std::string deep;
  for (int i = 0; i < 17; ++i) deep += list(kArrayKey, 1);
  REQUIRE(
      gguf_refused(folder, GgufBytes().add("k", kArrayKey, deep).bytes(), "metadata with arrays in arrays, 16 deep"));

  const auto none = folder.path("none.gguf"), pipe = folder.path("pipe.gguf");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  REQUIRE(complains(": is a directory; give the path of a .gguf file, or use", [&] { GgufFile{folder.path(".")}; }));
  REQUIRE(complains(none + ": no such file; give the path of a .gguf file", [&] { GgufFile{none}; }));
  REQUIRE(complains(none + "/x: no such file; give the path of a .gguf file", [&] { GgufFile{none + "/x"}; }));
  REQUIRE(complains(pipe + ": is a named pipe; give the path of a .gguf file", [&] { GgufFile{pipe}; }));
  REQUIRE(complains(": is a device; give the path of a .gguf file", [] { GgufFile{"/dev/null"}; }));
  REQUIRE(complains(": cannot be read (File name too long); give", [] { GgufFile{std::string(10'000, 'x')}; }));

  // Cut anywhere, it is refused.
  const auto whole = GgufBytes().add("k", "words").add_tensor("x", torch::ones({4, 4})).bytes();
  for (size_t length = 0; length < whole.size(); ++length) {
    INFO(length);
    REQUIRE(gguf_refused(folder, whole.substr(0, length), ""));
  }
}

TEST_CASE("a GGUF file that is no whole model says so") {
  const Folder folder;
  const auto refused = [&](GgufBytes bytes, const std::string& words) {
    const GgufFile file(folder.write("part.gguf", bytes.bytes()));
    return complains(words, [&] { file.check_model(); });
  };
  REQUIRE(refused(GgufBytes().add("split.count", 3U).add("split.no", 1U),
                  "is part 2 of a GGUF file that was split into 3"));
  REQUIRE(refused(GgufBytes().add("split.count", "many"), "is a part of a GGUF file that was split into many"));
  REQUIRE(refused(GgufBytes().add("general.type", "adapter"), "is a LoRA adapter (general.type is 'adapter')"));
  REQUIRE(refused(GgufBytes().add("general.type", 3U), "is no model (general.type is 3)"));
  GgufFile(folder.write("x.gguf", GgufBytes().add("general.type", "model").add("split.count", 1U).bytes()))
      .check_model();
}

}  // namespace attnpack
