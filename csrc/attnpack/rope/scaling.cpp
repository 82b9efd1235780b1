#include <attnpack/rope/scaling.h>

#include <algorithm>
#include <array>
#include <cmath>

#include <attnpack/core/check.h>

namespace attnpack {
namespace {

constexpr double kTwoPi = 6.283185307179586;
constexpr int64_t kMostDims = 1 << 20;  // far above any head, so that a wrong number does not fill the memory

using Frequencies = std::vector<double>;

Frequencies frequencies(int64_t dim, double base) {
  Frequencies result;
  for (int64_t i = 0; i < dim; i += 2) result.push_back(std::pow(base, -static_cast<double>(i) / dim));
  return result;
}

// YaRN's temperature m(s, a) = 0.1 a ln s + 1.
double temperature(double stretch, double weight) {
  return stretch <= 1 ? 1.0 : 0.1 * weight * std::log(stretch) + 1.0;
}

void check_positive(const char* name, double value) {
  ATTNPACK_CHECK(value > 0 && std::isfinite(value), "scaling: got ", name, " ", value, ", want a number above 0");
}

void check_scaling(const RopeScaling& s) {
  const std::array known{"default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "proportional"};
  const auto& type = s.rope_type();
  ATTNPACK_CHECK(std::find(known.begin(), known.end(), type) != known.end(), "scaling: got rope_type '", type,
                 "', want 'default', 'linear', 'ntk', 'dynamic', 'yarn', 'llama3', 'longrope' or 'proportional'");
  ATTNPACK_CHECK(s.factor() || type == "default" || type == "longrope" || type == "proportional",
                 "scaling: rope_type '", type, "' needs 'factor', how many times the trained length");
  check_positive("factor", s.factor().value_or(1.0));
  ATTNPACK_CHECK(s.original_max_position_embeddings().value_or(1) > 0, "scaling: got original_max_position_embeddings ",
                 *s.original_max_position_embeddings(), ", want at least 1, the trained length");
  check_positive("attention_factor", s.attention_factor().value_or(1.0));
  ATTNPACK_CHECK(s.partial_rotary_factor() >= 0 && s.partial_rotary_factor() <= 1,
                 "scaling: got partial_rotary_factor ", s.partial_rotary_factor(), ", want 0 to 1");
  check_positive("beta_fast", s.beta_fast());
  check_positive("beta_slow", s.beta_slow());
  ATTNPACK_CHECK(type != "yarn" || s.beta_fast() > s.beta_slow(), "scaling: got beta_fast ", s.beta_fast(),
                 ", want a number above beta_slow ", s.beta_slow());
  ATTNPACK_CHECK(std::isfinite(s.mscale()) && std::isfinite(s.mscale_all_dim()), "scaling: got mscale ", s.mscale(),
                 " and mscale_all_dim ", s.mscale_all_dim(), ", want finite numbers");
  check_positive("low_freq_factor", s.low_freq_factor());
  ATTNPACK_CHECK(s.high_freq_factor() > s.low_freq_factor() && std::isfinite(s.high_freq_factor()),
                 "scaling: got high_freq_factor ", s.high_freq_factor(), ", want a number above low_freq_factor ",
                 s.low_freq_factor());
}

// The index of the pair, as a fraction, that turns `rotations` times in the trained length.
double turning_pair(double rotations, int64_t dim, double base, double trained) {
  return dim * std::log(trained / (rotations * kTwoPi)) / (2 * std::log(base));
}

void stretch_yarn(Frequencies& inv_freq, int64_t dim, double base, double trained, const RopeScaling& s) {
  double low = turning_pair(s.beta_fast(), dim, base, trained), high = turning_pair(s.beta_slow(), dim, base, trained);
  if (s.truncate()) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] = inv_freq[i] / *s.factor() * ramp + inv_freq[i] * (1 - ramp);
  }
}

void stretch_llama3(Frequencies& inv_freq, double trained, const RopeScaling& s) {
  const double low = s.low_freq_factor(), high = s.high_freq_factor();
  for (double& f : inv_freq) {
    const double turns = trained * f / kTwoPi;  // in the trained length
    const double keep = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    f = (1 - keep) * f / *s.factor() + keep * f;
  }
}

Frequencies divided(Frequencies inv_freq, const char* name, const std::vector<double>& divisors) {
  ATTNPACK_CHECK(divisors.size() == inv_freq.size(), "scaling: got ", divisors.size(), " numbers as ", name, ", want ",
                 inv_freq.size(), ", one for each rotated pair");
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    check_positive(name, divisors[i]);
    inv_freq[i] /= divisors[i];
  }
  return inv_freq;
}

}  // namespace

RopeSettings rope_settings(int64_t dim, double base, int64_t max_positions, const std::optional<RopeScaling>& scaling,
                           bool interleaved, std::optional<bool> raw_keys) {
  ATTNPACK_CHECK(dim > 0 && dim % 2 == 0 && dim <= kMostDims, "dim: got ", dim,
                 ", want an even number of dims to rotate in pairs, at most ", kMostDims);
  ATTNPACK_CHECK(base > 0 && std::isfinite(base), "base: got ", base, ", want a number above 0");
  ATTNPACK_CHECK(max_positions > 0, "max_positions: got ", max_positions, ", want at least 1");
  const RopeScaling s = scaling.value_or(RopeScaling());
  check_scaling(s);
  const auto& type = s.rope_type();
  const int64_t trained_len = s.original_max_position_embeddings().value_or(max_positions);
  const auto trained = static_cast<double>(trained_len);
  const bool ntk = type == "ntk" || type == "dynamic";
  ATTNPACK_CHECK(!ntk || dim > 2, "dim: got 2, want at least 4 for rope_type '", type,
                 "', which takes base to the power of dim / (dim - 2)");
  ATTNPACK_CHECK(type != "yarn" || base > 1, "base: got ", base, ", want a number above 1 for rope_type 'yarn'");

  RopeSettings result;
  result.interleaved = interleaved;
  if (type == "ntk") base *= std::pow(*s.factor(), static_cast<double>(dim) / static_cast<double>(dim - 2));
  result.inv_freq = frequencies(dim, base);
  if (type == "linear") {
    for (double& f : result.inv_freq) f /= *s.factor();
  } else if (type == "dynamic") {
    result.growth = *s.factor();
  } else if (type == "yarn") {
    stretch_yarn(result.inv_freq, dim, base, trained, s);
    const double above = temperature(*s.factor(), s.mscale()), below = temperature(*s.factor(), s.mscale_all_dim());
    const bool ratio = s.mscale() != 0 && s.mscale_all_dim() != 0;
    result.factor = s.attention_factor().value_or(ratio ? above / below : temperature(*s.factor(), 1.0));
  } else if (type == "llama3") {
    stretch_llama3(result.inv_freq, trained, s);
  } else if (type == "proportional") {
    const auto rotating = static_cast<size_t>(s.partial_rotary_factor() * static_cast<double>(dim) / 2);
    for (size_t i = 0; i < result.inv_freq.size(); ++i)
      result.inv_freq[i] = i < rotating ? result.inv_freq[i] / s.factor().value_or(1.0) : 0.0;
  } else if (type == "longrope") {
    const Frequencies plain = result.inv_freq;
    result.inv_freq = divided(plain, "short_factor", s.short_factor());
    result.long_inv_freq = divided(plain, "long_factor", s.long_factor());
    if (result.long_inv_freq == result.inv_freq) result.long_inv_freq.clear();
    const double stretch = s.factor().value_or(static_cast<double>(max_positions) / trained);
    ATTNPACK_CHECK(stretch <= 1 || s.attention_factor() || trained_len > 1,
                   "scaling: got original_max_position_embeddings 1, want more, or attention_factor");
    const double factor = stretch <= 1 ? 1.0 : std::sqrt(1 + std::log(stretch) / std::log(trained));
    result.factor = s.attention_factor().value_or(factor);
  }
  if (type != "default" && s.mscale_all_dim() != 0) {
    result.softmax_factor = std::pow(temperature(s.factor().value_or(1.0), s.mscale_all_dim()), 2);
  }
  if (result.by_length()) result.trained_len = trained_len;
  result.raw_keys = raw_keys.value_or(result.by_length());
  return result;
}

}  // namespace attnpack
