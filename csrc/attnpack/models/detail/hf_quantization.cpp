#include <attnpack/models/detail/hf_quantization.h>

#include <algorithm>
#include <string_view>

#include <attnpack/weights/detail/scaled_blocks.h>

namespace attnpack {

namespace {

// Settings that leave the weights' numbers as they are, and those that the constructor reads.
constexpr std::string_view kKnown[] = {"quant_method",      "fmt",       "weight_block_size",
                                       "activation_scheme", "scale_fmt", "modules_to_not_convert",
                                       "dequantize"};

bool is_word(const Json* value, std::string_view word) {
  const auto* text = value ? value->as<std::string>() : nullptr;
  return text && *text == word;
}

constexpr std::string_view kBlocks = "_blocks";

}  // namespace

HfQuantization::HfQuantization(const HfSettings& config) {
  const auto& given = config.get("quantization_config");
  if (given.is_null()) return;
  const auto* method = given.find("quant_method");
  method_ = is_word(method, "fp8") ? Method::kFp8 : is_word(method, "mxfp4") ? Method::kMxfp4 : Method::kNone;
  config.check(method_ != Method::kNone, "quantization_config = ", quoted(given),
               " in config.json is not supported; from_hf reads weights of quant_method fp8 and mxfp4");
  for (const auto& [name, value] : *given.as<Json::Object>()) {
    const bool known = std::find(std::begin(kKnown), std::end(kKnown), name) != std::end(kKnown);
    config.check(known || !is_set(value), "quantization_config has ", excerpt(name), " = ", quoted(value),
                 " in config.json, which is not known here");
  }
  if (method_ != Method::kFp8) return;
  const auto *format = given.find("fmt"), *sizes = given.find("weight_block_size");
  config.check(!format || is_word(format, "e4m3"), "quantization_config has fmt = ", format ? shown(*format) : "",
               " in config.json, wants 'e4m3'");
  const auto* list = sizes ? sizes->as<Json::List>() : nullptr;
  const bool two = list && list->size() == 2;
  for (size_t i = 0; i < 2; ++i) {
    const auto* size = two ? (*list)[i].as<int64_t>() : nullptr;
    config.check(size && *size >= 1, "quantization_config has weight_block_size = ", sizes ? shown(*sizes) : "None",
                 " in config.json, wants two ints of at least 1");
    block_[i] = *size;
  }
}

std::string HfQuantization::scales_of(const std::string& stored) const {
  if (method_ == Method::kFp8 && stored.ends_with(".weight")) return stored + "_scale_inv";
  if (method_ == Method::kMxfp4 && stored.ends_with(kBlocks))
    return stored.substr(0, stored.size() - kBlocks.size()) + "_scales";
  return "";
}

at::Tensor HfQuantization::numbers(const at::Tensor& stored, const at::Tensor& scales, const Cut& cut) const {
  // Experts lie in one tensor, so MXFP4 is cut first: decoding all of them for each one would take long.
  if (method_ == Method::kMxfp4) return from_mxfp4(cut ? cut(stored) : stored, cut ? cut(scales) : scales);
  const auto all = from_fp8(stored, scales, block_);
  return cut ? cut(all) : all;
}

}  // namespace attnpack
