#include <attnpack/models/detail/sampler.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include <attnpack/core/check.h>

namespace attnpack {

namespace {

bool has_nan(const at::Tensor& logits) {
  if (!logits.is_cpu() || logits.scalar_type() != at::kFloat || !logits.is_contiguous())
    return logits.isnan().any().item<bool>();
  const auto* const x = logits.const_data_ptr<float>();
  bool found = false;  // a loop without a way out is vectorised
  for (int64_t i = 0; i < logits.numel(); ++i) found |= x[i] != x[i];
  return found;
}

// Without this check a model that overflows would still give tokens.
void check_numbers(const at::Tensor& logits) {
  ATTNPACK_CHECK(!has_nan(logits),
                 "logits: got NaN from the model, want numbers to choose a token by: look for NaN in its weights, or "
                 "use a wider dtype");
}

// The largest logit of each row, and its first token. torch's max compares one number after the other where it looks
// for the token too, which takes as long as some layers of a small model.
std::tuple<at::Tensor, at::Tensor> largest(const at::Tensor& logits) {
  if (!logits.is_cpu() || logits.scalar_type() != at::kFloat) return logits.max(-1);
  const auto rows = logits.contiguous(), best = rows.amax(-1);  // NaN where a row has one
  const auto tokens = at::empty(best.sizes(), best.options().dtype(at::kLong));
  const auto size = rows.size(-1);
  for (int64_t r = 0; r < best.numel(); ++r) {
    const auto* const row = rows.const_data_ptr<float>() + r * size;
    tokens.mutable_data_ptr<int64_t>()[r] = std::find(row, row + size, best.const_data_ptr<float>()[r]) - row;
  }
  return {best, tokens};
}

}  // namespace

Sampler::Sampler(std::optional<double> temperature, std::optional<int64_t> top_k, std::optional<double> top_p,
                 std::optional<uint64_t> seed, at::Device device)
    : greedy_(temperature ? *temperature == 0 : !top_k && !top_p),
      temperature_(temperature.value_or(1)),
      top_p_(top_p.value_or(1)),
      top_k_(top_k.value_or(0)) {
  ATTNPACK_CHECK(temperature_ >= 0 && std::isfinite(temperature_), "temperature: got ", temperature_,
                 ", want 0 (greedy) or more");
  ATTNPACK_CHECK(top_k_ >= 0, "top_k: got ", top_k_, ", want 0 (all tokens) or more");
  ATTNPACK_CHECK(top_p_ > 0 && top_p_ <= 1, "top_p: got ", top_p_, ", want a number in (0, 1]");
  if (seed) {
    generator_ = at::globalContext().defaultGenerator(device).clone();
    generator_->set_current_seed(*seed);
  }
}

at::Tensor Sampler::operator()(const at::Tensor& logits) {
  if (greedy_) {
    const auto [best, tokens] = largest(logits);
    check_numbers(best);  // a NaN counts as the largest
    return tokens;
  }
  check_numbers(logits);
  const auto probs = probabilities(logits);
  ATTNPACK_CHECK(!probs.isnan().any().item<bool>(), "temperature: got ", temperature_, " for logits up to ",
                 logits.max().item<double>(), ", want one that keeps logits / temperature finite, or 0 for greedy");
  return at::multinomial(probs, 1, false, generator_).squeeze(-1);
}

at::Tensor Sampler::probabilities(const at::Tensor& logits) const {
  auto scores = logits.to(at::kFloat) / temperature_;
  if (top_k_ > 0 && top_k_ < scores.size(-1)) {
    const auto kth = std::get<0>(scores.topk(top_k_, -1)).narrow(-1, top_k_ - 1, 1);
    scores = scores.masked_fill(scores < kth, -std::numeric_limits<float>::infinity());
  }
  auto probs = scores.softmax(-1);
  if (top_p_ < 1) {
    // A token stays if the likelier tokens hold less than top_p.
    auto [sorted, order] = probs.sort(-1, /*descending=*/true);
    const auto before = sorted.cumsum(-1) - sorted;
    const double least = std::numeric_limits<float>::min();  // before is a float: below this, 0 would not be less
    probs = at::zeros_like(probs).scatter(-1, order, sorted.masked_fill(before >= std::max(top_p_, least), 0));
  }
  return probs;  // multinomial takes weights, so they need not sum to 1
}

}  // namespace attnpack
