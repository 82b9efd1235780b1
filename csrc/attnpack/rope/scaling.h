#pragma once

#include <attnpack/ops/option_list.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace attnpack {

// How positions are stretched. The names are those of the "rope_scaling" dict of Hugging Face configs.
struct RopeScaling : OptionList<RopeScaling> {
  // default, linear, ntk, dynamic, yarn, llama3, longrope or proportional
  ATTNPACK_OPTION(std::string, rope_type) = "default";
  // The new length as a multiple of the trained length. Without it longrope takes max_positions /
  // original_max_position_embeddings.
  ATTNPACK_OPTION(std::optional<double>, factor);
  // The trained length; default max_positions.
  ATTNPACK_OPTION(std::optional<int64_t>, original_max_position_embeddings);
  // The factor on cos and sin (yarn, longrope); default: as their papers have it.
  ATTNPACK_OPTION(std::optional<double>, attention_factor);
  // yarn: pairs that turn beta_fast times or more in the trained length stay. Pairs that turn beta_slow times or fewer
  // stretch.
  ATTNPACK_OPTION(double, beta_fast) = 32.0;
  ATTNPACK_OPTION(double, beta_slow) = 1.0;
  // yarn: the ramp between those pairs begins and ends at whole pairs.
  ATTNPACK_OPTION(bool, truncate) = true;
  // yarn, as in DeepSeek: cos and sin are multiplied by m(factor, mscale) / m(factor, mscale_all_dim), and latent
  // attention's scale by m(factor, mscale_all_dim)^2, where m(s, a) = 0.1 a ln s + 1. 0 means not set.
  ATTNPACK_OPTION(double, mscale) = 0.0;
  ATTNPACK_OPTION(double, mscale_all_dim) = 0.0;
  // llama3: wavelengths above original / low_freq_factor stretch, those below original / high_freq_factor stay.
  ATTNPACK_OPTION(double, low_freq_factor) = 1.0;
  ATTNPACK_OPTION(double, high_freq_factor) = 4.0;
  // proportional: the part of the pairs that rotate, the first ones; the others stay (Gemma 4).
  ATTNPACK_OPTION(double, partial_rotary_factor) = 1.0;
  // longrope: divisors of each of the dim / 2 frequencies, up to the trained length and past it.
  ATTNPACK_OPTION(std::vector<double>, short_factor);
  ATTNPACK_OPTION(std::vector<double>, long_factor);
};

// How queries and keys are rotated.
struct RopeSettings {
  std::vector<double> inv_freq;  // r/2 frequencies
  double factor = 1.0;           // on cos and sin
  bool interleaved = false;      // pairs (2i, 2i + 1) instead of (i, i + r/2)
  // Past trained_len a sequence rotates by other frequencies: by long_inv_freq (r/2, LongRoPE), or, with growth > 0, by
  // those of a base that grows with the length (dynamic NTK).
  std::vector<double> long_inv_freq;
  double growth = 0.0;
  int64_t trained_len = 0;
  // Caches hold keys before rotation, and each call rotates all of them: exact where frequencies follow the length.
  bool raw_keys = false;
  // The factor on latent attention's scale.
  double softmax_factor = 1.0;

  bool by_length() const { return growth > 0 || !long_inv_freq.empty(); }
};

// theta_i = base^(-2i / dim) in fp64, stretched as scaling says. Linear: Chen et al. 2023. ntk and dynamic: base times
// a power of factor (bloc97 and emozilla 2023). yarn: Peng et al. 2023, section 3.2 to 3.4. llama3: Dubey et al. 2024.
// longrope: Ding et al. 2024. raw_keys: default true where frequencies follow the length. Raises, naming the argument.
RopeSettings rope_settings(int64_t dim, double base, int64_t max_positions, const std::optional<RopeScaling>& scaling,
                           bool interleaved, std::optional<bool> raw_keys = std::nullopt);

}  // namespace attnpack
