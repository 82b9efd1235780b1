#include <attnpack/ops/cpu/isa/bf16_pairs.h>
#include <attnpack/ops/cpu/isa/kernels.h>

// The highest speed of this machine, for benchmarks to compare with.
namespace attnpack::ATTNPACK_ISA {

// Independent chains of fused multiply-adds, enough of them to fill every unit. Returns how many single multiply-adds
// were done.
double multiply_adds(int64_t rounds, float* sink) {
  constexpr int kChains = kVectorBytes == 64 ? 24 : 12;
  Vec<float> chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = broadcast(1e-3f * static_cast<float>(i));
  const Vec<float> factor = broadcast(0.999f), step = broadcast(1e-5f);
  for (int64_t k = 0; k < rounds; ++k)
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) chain[i] = chain[i] * factor + step;
  for (int i = 0; i < kChains; ++i) *sink += chain[i][0];
  return static_cast<double>(rounds) * kChains * kLanes<float>;
}

// The same for pairs of bf16; 0 where bf16 is widened.
double pair_multiply_adds(int64_t rounds, float* sink) {
  if constexpr (!kPairProducts) return 0;
  constexpr int kChains = kVectorBytes == 64 ? 24 : 12;
  Vec<float> chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = broadcast(1e-3f * static_cast<float>(i));
  const Vec<Pair> step = Vec<Pair>{} + 0x38003800u, one = Vec<Pair>{} + 0x3f803f80u;  // 2^-15 and 1, twice
  for (int64_t k = 0; k < rounds; ++k)
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) chain[i] = pair_products(chain[i], step, one);
  for (int i = 0; i < kChains; ++i) *sink += chain[i][0];
  return 2.0 * static_cast<double>(rounds) * kChains * kLanes<float>;
}

// Reads all data once, in order.
void read_through(const float* data, int64_t count, float* sink) {
  constexpr int kChains = 8;
  Vec<float> sum[kChains] = {};
  for (int64_t i = 0; i + kChains * kLanes<float> <= count; i += kChains * kLanes<float>)
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) {
      __builtin_prefetch(data + i + c * kLanes<float> + 2048 / sizeof(float));
      sum[c] += load<float>(data + i + c * kLanes<float>);
    }
  for (int c = 0; c < kChains; ++c) *sink += sum[c][0];
}

}  // namespace attnpack::ATTNPACK_ISA
