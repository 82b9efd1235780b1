#include <attnpack/models/detail/gguf_families.h>
#include <attnpack/models/detail/hf_settings.h>

namespace attnpack {

namespace {

// Settings of RoPE scaling that must have these values.
constexpr std::pair<const char*, double> kUsual[] = {
    {"alpha", 0}, {"attn_factor", 1}, {"yarn_attn_factor", 1}, {"yarn_log_multiplier", 0}, {"yarn_ext_factor", 1}};

std::string key_of(const char* name) { return text_of({"rope.scaling.", name}); }

}  // namespace

std::optional<RopeScaling> gguf_rope_scaling(const GgufSettings& file, const GgufFamily& family, int64_t head_dim) {
  const auto factor_key = file.has(key_of("factor")) ? key_of("factor") : "rope.scale_linear";
  const auto& factor = file.get(factor_key);
  const bool stretched = !factor.is_null() && number_in(factor) != 1.0;
  const auto& given = file.get(key_of("type"));
  const auto kind = given.is_null() ? Json{std::string(stretched ? "linear" : "none")} : given;
  const auto is_kind = [&](const char* word) { return kind.as<std::string>() && *kind.as<std::string>() == word; };
  for (const auto& [name, usual] : kUsual) {
    const auto& value = file.get(key_of(name));
    if (value.is_null() || family.settings.count(key_of(name))) continue;
    file.check(number_in(value) == usual, file.full(key_of(name)), " = ", quoted(value),
               " is not supported yet, wants ", usual, " or no such key", kOtherModel);
  }
  if (file.file().has(kRopeFreqs)) {
    file.check((is_kind("none") || is_kind("linear")) && !stretched, "has ", kRopeFreqs,
               " together with rope.scaling.type ", quoted(kind), ", which is not supported", kOtherModel);
    // The result of Llama 3's scaling. This is LongRoPE with the same list for all lengths.
    const auto divisors = *file.vector(kRopeFreqs, head_dim / 2);
    return RopeScaling().rope_type("longrope").short_factor(divisors).long_factor(divisors).attention_factor(1.0);
  }
  if (is_kind("none") || (is_kind("linear") && !stretched)) return std::nullopt;
  file.check(is_kind("linear") || is_kind("yarn"), file.full(key_of("type")), " is ", quoted(kind),
             ", wants 'none', 'linear' or 'yarn'", kOtherModel);
  auto scaling = RopeScaling().factor(file.number(factor_key, 1.0));
  if (is_kind("linear")) return scaling.rope_type("linear");
  const auto trained = file.size_if_set(key_of("original_context_length"));
  scaling.rope_type("yarn").original_max_position_embeddings(trained ? *trained : file.size("context_length"));
  if (file.is_set(key_of("yarn_beta_fast"))) scaling.beta_fast(file.number(key_of("yarn_beta_fast")));
  if (file.is_set(key_of("yarn_beta_slow"))) scaling.beta_slow(file.number(key_of("yarn_beta_slow")));
  return scaling;
}

}  // namespace attnpack
