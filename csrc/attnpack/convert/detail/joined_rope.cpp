#include <attnpack/convert/detail/joined_rope.h>

#include <cmath>
#include <numeric>

namespace attnpack::convert {

namespace {

std::vector<double> divisors(const std::vector<double>& inv_freq, const std::vector<int64_t>& pairs, double base) {
  const auto all = std::accumulate(pairs.begin(), pairs.end(), 0.0);
  std::vector<double> result;
  for (size_t p = 0; p < pairs.size(); ++p)
    for (int64_t i = 0; i < pairs[p]; ++i)
      result.push_back(std::pow(base, -static_cast<double>(result.size()) / all) / inv_freq[p]);
  return result;
}

}  // namespace

RopeScaling joined_scaling(const RopeSettings& rope, const std::vector<int64_t>& pairs, double base,
                           int64_t max_positions) {
  const auto trained = rope.by_length() ? rope.trained_len : max_positions;
  return RopeScaling()
      .rope_type("longrope")
      .short_factor(divisors(rope.inv_freq, pairs, base))
      .long_factor(divisors(rope.by_length() ? rope.long_inv_freq : rope.inv_freq, pairs, base))
      .attention_factor(rope.factor)
      .original_max_position_embeddings(trained)
      .factor(static_cast<double>(max_positions) / static_cast<double>(trained));
}

}  // namespace attnpack::convert
