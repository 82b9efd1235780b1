// The kernels without torch, for the sanitizers: every buffer ends at a page that may not be touched, sizes are odd,
// and the results of every instruction set are compared with the formula. Built and run by scripts/sanitize.sh.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <attnpack/core/dropout.h>
#include <attnpack/ops/cpu/isa_table.h>
#include <attnpack/ops/cpu/work_units.h>

#include "../cpp/support/guarded.h"

using namespace attnpack;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kSizes[] = {1, 2, 3, 7, 17, 33, 63, 65, 127, 129, 1030};

size_t width(DType d) { return d == DType::kFloat64 ? 8 : d == DType::kFloat32 ? 4 : d == DType::kBool ? 1 : 2; }

// Numbers of any storage type; 16-bit ones as bf16 by truncation, or small fp16 by scaling.
double get(const void* p, DType d, int64_t i) {
  switch (d) {
    case DType::kFloat64:
      return static_cast<const double*>(p)[i];
    case DType::kFloat32:
      return static_cast<const float*>(p)[i];
    case DType::kBFloat16: {
      const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(p)[i]) << 16;
      float x;
      std::memcpy(&x, &bits, 4);
      return x;
    }
    default: {  // fp16
      const uint16_t h = static_cast<const uint16_t*>(p)[i];
      const int exponent = h >> 10 & 31, fraction = h & 1023;
      const double x = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
      return h >> 15 ? -x : x;
    }
  }
}
void put(void* p, DType d, int64_t i, double x) {
  if (d == DType::kFloat64) {
    static_cast<double*>(p)[i] = x;
  } else if (d == DType::kFloat32) {
    static_cast<float*>(p)[i] = static_cast<float>(x);
  } else if (d == DType::kBFloat16) {
    const float f = static_cast<float>(x);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(bits >> 16);
  } else {  // fp16: eighths in [-2, 2], which are exact
    const double eighths = std::round(x * 8);
    int exponent;
    const double fraction = std::frexp(std::fabs(eighths), &exponent);
    const int bits = eighths == 0 ? 0 : (exponent + 11) << 10 | (static_cast<int>(fraction * 2048) & 1023);
    static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(bits | (eighths < 0 ? 0x8000 : 0));
  }
}

std::mt19937_64 generator(7);
double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(generator); }
int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

void fill(Guarded& g, DType d) {
  for (size_t i = 0; i < g.bytes() / width(d); ++i) put(g.data(), d, static_cast<int64_t>(i), uniform(-2, 2));
}

// Hands units to threads of its own, in order.
struct Threads {
  int threads_;
  int64_t count() const { return 0; }  // so that small problems too have units of several kv heads
  template <class F>
  void operator()(Order, int64_t units, double, size_t scratch_bytes, F&& unit) const {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      Guarded scratch((scratch_bytes + 63) / 64 * 64 + 64);
      for (int64_t i = next++; i < units; i = next++) unit(i, scratch.data());
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < threads_; ++i) threads.emplace_back(work);
    work();
    for (auto& thread : threads) thread.join();
  }
};

Strides contiguous(int64_t heads, int64_t rows, int64_t columns) {
  return {heads * rows * columns, rows * columns, columns, 1};
}

// A hash of the results of each kind of call, for scripts/check_arm.sh: FNV-1a.
struct Bits {
  uint64_t hash = 0xcbf29ce484222325ull;
  void add(Guarded& g) {
    const auto* const bytes = static_cast<const unsigned char*>(g.data());
    for (size_t i = 0; i < g.bytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  }
};
struct AllBits {
  Bits attention, layers, stored;
};
AllBits bits;

int failures = 0;
void expect(bool good, const char* isa, const char* what, int64_t n) {
  if (good) return;
  std::printf("%s: %s wrong in problem %lld\n", isa, what, static_cast<long long>(n));
  ++failures;
}

bool allowed(const AttentionParams& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t position = i + p.q_offset;
  return (!p.causal || j <= position) && (p.window_left < 0 || position - j <= p.window_left) &&
         (p.window_right < 0 || j - position <= p.window_right) && (!p.kv_lens || j < p.kv_lens[b]) &&
         (!p.mask || static_cast<const bool*>(p.mask)[(h * p.q_len + i) * p.kv_len + j]);
}

// NaN in one key and its value, the first sequence's and kv head's: the rows that may attend it become NaN, all others
// stay as they were, bit by bit. Leaves everything as it was.
void poison_a_key(const char* isa, const Kernels& kernels, const AttentionParams& p, const Threads& threads,
                  Guarded& out, Guarded& lse, int64_t n) {
  const size_t w = width(p.dtype);
  const int64_t j = pick(0, p.kv_len - 1), group = p.num_heads / p.num_kv_heads;
  const uint16_t half_nan = 0x7e00;
  struct {
    char* row;
    int64_t dim;
    std::vector<char> before;
  } parts[] = {{const_cast<char*>(static_cast<const char*>(p.key)) + j * p.head_dim * w, p.head_dim, {}},
               {const_cast<char*>(static_cast<const char*>(p.value)) + j * p.v_head_dim * w, p.v_head_dim, {}}};
  for (auto& part : parts) {
    part.before.assign(part.row, part.row + part.dim * w);
    for (int64_t d = 0; d < part.dim; ++d)
      if (p.dtype == DType::kFloat16)
        std::memcpy(part.row + d * w, &half_nan, w);
      else
        put(part.row, p.dtype, d, std::nan(""));
  }
  const auto copy = [](Guarded& g) {
    const char* data = static_cast<const char*>(g.data());
    return std::vector<char>(data, data + g.bytes());
  };
  const std::vector<char> expected = copy(out), expected_lse = copy(lse);
  run_forward(kernels, {&p, 1}, threads);
  bool kept = true, seen = true;
  for (int64_t row = 0; row < p.batch * p.num_heads * p.q_len; ++row) {
    const int64_t b = row / p.q_len / p.num_heads, h = row / p.q_len % p.num_heads, i = row % p.q_len;
    const int64_t first = row * p.v_head_dim;
    if (b == 0 && h < group && allowed(p, b, h, i, j))
      for (int64_t d = 0; d < p.v_head_dim; ++d)
        seen &= p.dtype == DType::kFloat16 ? (static_cast<const uint16_t*>(out.data())[first + d] & 0x7fff) > 0x7c00
                                           : std::isnan(get(out.data(), p.dtype, first + d));
    else
      kept &= std::memcmp(static_cast<char*>(out.data()) + first * w, &expected[first * w], p.v_head_dim * w) == 0;
  }
  expect(kept, isa, "out of rows that exclude a NaN", n);
  expect(seen, isa, "out of rows that attend a NaN", n);
  for (auto& part : parts) std::memcpy(part.row, part.before.data(), part.before.size());
  std::memcpy(out.data(), expected.data(), expected.size());
  std::memcpy(lse.data(), expected_lse.data(), expected_lse.size());
}

// Calls of several lengths, which read pieces of p's tensors, in one loop: the same bits as one after the other.
void attend_together(const char* isa, const Kernels& kernels, const AttentionParams& p, const Threads& threads,
                     int64_t n) {
  const size_t w = width(p.dtype), aw = p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  std::vector<AttentionParams> calls;
  std::vector<std::unique_ptr<Guarded>> outs, lses;
  for (int i = 0; i < 4; ++i) {
    AttentionParams& c = calls.emplace_back(p);
    c.batch = 1;
    c.kv_lens = nullptr;
    c.q_len = pick(0, p.q_len);
    c.kv_len = pick(0, p.kv_len);
    outs.push_back(std::make_unique<Guarded>(c.num_heads * c.q_len * c.v_head_dim * w));
    lses.push_back(std::make_unique<Guarded>(c.num_heads * c.q_len * aw));
    c.out = outs.back()->data(), c.lse = lses.back()->data();
    c.out_strides = contiguous(c.num_heads, c.q_len, c.v_head_dim);
  }
  std::vector<std::vector<char>> expected;
  const auto bytes = [](Guarded& g) {
    const char* data = static_cast<const char*>(g.data());
    return std::vector<char>(data, data + g.bytes());
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    run_forward(kernels, {&calls[i], 1}, threads);
    expected.push_back(bytes(*outs[i]));
    expected.push_back(bytes(*lses[i]));
    std::memset(outs[i]->data(), 1, outs[i]->bytes());
    std::memset(lses[i]->data(), 1, lses[i]->bytes());
  }
  run_forward(kernels, calls, threads);
  for (size_t i = 0; i < calls.size(); ++i)
    expect(bytes(*outs[i]) == expected[2 * i] && bytes(*lses[i]) == expected[2 * i + 1], isa, "calls in one loop", n);
}

// The first sequence, with its keys in pages of a pool: the same bits as with the keys in one piece. Each page ends at
// memory that may not be touched, and so does the table.
void attend_in_pages(const char* isa, const Kernels& kernels, const AttentionParams& p, const Threads& threads,
                     int64_t n) {
  const size_t w = width(p.dtype), aw = p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  AttentionParams c = p;
  c.batch = 1;
  c.kv_lens = nullptr;
  c.kv_len = pick(0, p.kv_len);
  Guarded out(c.num_heads * c.q_len * c.v_head_dim * w), lse(c.num_heads * c.q_len * aw);
  c.out = out.data(), c.lse = lse.data();
  run_forward(kernels, {&c, 1}, threads);
  std::vector<char> expected(static_cast<char*>(out.data()), static_cast<char*>(out.data()) + out.bytes());
  std::memset(out.data(), 1, out.bytes());
  constexpr int64_t kPages[] = {1, 7, 8, 16, 24, 256};
  c.page_size = kPages[pick(0, 5)];
  const int64_t pages = (c.kv_len + c.page_size - 1) / c.page_size;
  Guarded table(pages * sizeof(int32_t));
  auto* entries = static_cast<int32_t*>(table.data());
  for (int64_t i = 0; i < pages; ++i) entries[i] = static_cast<int32_t>(i);
  if (n % 3) std::shuffle(entries, entries + pages, generator);
  // The pages of a head lie together, or the heads of a page, or the heads of a row.
  const auto pool = [&](const void* from, int64_t dim, Strides& strides, int64_t layout) {
    const int64_t page = c.page_size * dim, all = c.num_kv_heads * page;
    auto to = std::make_unique<Guarded>(pages * all * w);
    const Strides own = strides;
    strides = layout == 0   ? Strides{page, pages * page, dim, 1}
              : layout == 1 ? Strides{all, page, dim, 1}
                            : Strides{all, dim, c.num_kv_heads * dim, 1};
    for (int64_t h = 0; h < c.num_kv_heads; ++h)
      for (int64_t j = 0; j < c.kv_len; ++j)
        std::memcpy(
            static_cast<char*>(to->data()) +
                (entries[j / c.page_size] * strides.batch + h * strides.head + j % c.page_size * strides.row) * w,
            static_cast<const char*>(from) + (h * own.head + j * own.row) * w, dim * w);
    return to;
  };
  const int64_t layout = pick(0, 2);
  const auto keys = pool(p.key, c.head_dim, c.key_strides, layout),
             values = pool(p.value, c.v_head_dim, c.value_strides, layout);
  c.key = keys->data(), c.value = values->data(), c.block_table = entries;
  run_forward(kernels, {&c, 1}, threads);
  expect(std::memcmp(out.data(), expected.data(), expected.size()) == 0, isa, "keys in pages", n);
  if (layout != 2 || !std::is_sorted(entries, entries + pages)) return;
  c.block_table = nullptr;  // such pages in order are packed keys
  std::memset(out.data(), 1, out.bytes());
  run_forward(kernels, {&c, 1}, threads);
  expect(std::memcmp(out.data(), expected.data(), expected.size()) == 0, isa, "packed keys", n);
}

void attend(const char* isa, const Kernels& kernels, int64_t n) {
  const auto size = [](int64_t most) {
    int64_t s = kSizes[pick(0, 10)];
    while (s > most) s = kSizes[pick(0, 10)];
    return s;
  };
  AttentionParams p{};
  p.batch = pick(1, 2);
  p.num_kv_heads = pick(1, 3);
  p.num_heads = p.num_kv_heads * pick(1, 5);
  p.q_len = n % 9 == 0 ? 1030 : size(129);
  p.kv_len = n % 13 == 0 ? 4100 : n % 7 == 0 ? 1030 : size(129);  // 4100: more than one tile takes alone
  p.head_dim = n % 11 == 0 ? 576 : size(129);
  p.v_head_dim = n % 11 == 0 ? 512 : size(129);
  if (p.q_len * p.kv_len * p.num_heads > 400000) p.num_heads = p.num_kv_heads = p.batch = 1;
  p.dtype = static_cast<DType>(pick(0, 3));
  p.scale = uniform(0.02, 0.3);
  p.softcap = n % 4 == 0 ? 3 : 0;
  p.causal = n % 3 == 0;
  p.q_offset = p.causal ? p.kv_len - p.q_len : 0;
  p.window_left = n % 5 == 0 ? pick(0, 9) : -1;
  p.window_right = n % 6 == 0 ? pick(0, 9) : -1;
  const DType accumulation = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const size_t w = width(p.dtype), aw = width(accumulation);
  const int64_t rows = p.batch * p.num_heads * p.q_len, keys = p.batch * p.num_kv_heads * p.kv_len;
  Guarded q(rows * p.head_dim * w), k(keys * p.head_dim * w), v(keys * p.v_head_dim * w), out(rows * p.v_head_dim * w);
  Guarded lse(rows * aw), mask(p.num_heads * p.q_len * p.kv_len), grad_out(rows * p.v_head_dim * w), delta(rows * aw);
  Guarded dq(rows * p.head_dim * w), dk(keys * p.head_dim * w), dv(keys * p.v_head_dim * w);
  for (auto* g : {&q, &k, &v, &grad_out}) fill(*g, p.dtype);
  fill(delta, accumulation);
  for (size_t i = 0; i < mask.bytes(); ++i) static_cast<bool*>(mask.data())[i] = pick(0, 3) > 0;
  std::vector<int64_t> kv_lens(p.batch);
  for (auto& length : kv_lens) length = pick(0, p.kv_len);
  std::vector<double> sinks(p.num_heads), slopes(p.num_heads);
  for (auto& x : sinks) x = uniform(-2, 2);
  for (auto& x : slopes) x = uniform(0, 0.2);
  p.query = q.data(), p.key = k.data(), p.value = v.data(), p.out = out.data(), p.lse = lse.data();
  p.query_strides = contiguous(p.num_heads, p.q_len, p.head_dim);
  p.key_strides = contiguous(p.num_kv_heads, p.kv_len, p.head_dim);
  p.value_strides = contiguous(p.num_kv_heads, p.kv_len, p.v_head_dim);
  p.out_strides = contiguous(p.num_heads, p.q_len, p.v_head_dim);
  if (n % 2) p.kv_lens = kv_lens.data();
  if (n % 8 == 1) p.sinks = sinks.data();
  if (n % 8 == 2) p.alibi_slopes = slopes.data();
  if (n % 8 == 3)
    p.mask = mask.data(), p.mask_dtype = DType::kBool, p.mask_strides = {0, p.q_len * p.kv_len, p.kv_len, 1};
  const Threads threads{static_cast<int>(pick(1, 4))};
  run_forward(kernels, {&p, 1}, threads);

  const int64_t group = p.num_heads / p.num_kv_heads;
  double worst = 0, worst_lse = 0;
  for (int check = 0; check < 20; ++check) {  // some rows against the formula
    const int64_t b = pick(0, p.batch - 1), h = pick(0, p.num_heads - 1), i = pick(0, p.q_len - 1);
    const int64_t position = i + p.q_offset, kv = (b * p.num_kv_heads + h / group) * p.kv_len;
    const int64_t row = (b * p.num_heads + h) * p.q_len + i;
    std::vector<double> s(p.kv_len);
    double top = p.sinks ? sinks[h] : -kInf, sum = 0;
    for (int64_t j = 0; j < p.kv_len; ++j) {
      double x = 0;
      for (int64_t d = 0; d < p.head_dim; ++d)
        x += get(p.query, p.dtype, row * p.head_dim + d) * get(p.key, p.dtype, (kv + j) * p.head_dim + d);
      x *= p.scale;
      if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
      if (p.alibi_slopes) x -= slopes[h] * static_cast<double>(std::llabs(position - j));
      s[j] = allowed(p, b, h, i, j) ? x : -kInf;
      top = std::max(top, s[j]);
    }
    for (auto& x : s) sum += x = x == -kInf ? 0 : std::exp(x - top);
    if (p.sinks) sum += std::exp(sinks[h] - top);
    const double lse_got = get(lse.data(), accumulation, row), lse_wanted = top + std::log(sum);
    if (lse_got != lse_wanted) worst_lse = std::max(worst_lse, std::fabs(lse_got - lse_wanted));
    for (int64_t d = 0; d < p.v_head_dim; ++d) {
      double wanted = 0;
      for (int64_t j = 0; j < p.kv_len; ++j) wanted += s[j] * get(p.value, p.dtype, (kv + j) * p.v_head_dim + d);
      wanted = sum > 0 ? wanted / sum : 0;
      worst = std::max(worst, std::fabs(get(p.out, p.dtype, row * p.v_head_dim + d) - wanted));
    }
  }
  // 16 bits: 2^-8 from rounding numbers below 2, as much again from rounding the weights of values below 2.
  expect(worst < (w == 2 ? 0.01 : 1e-3), isa, "out", n);
  bits.attention.add(out);
  expect(worst_lse < 1e-3, isa, "lse", n);
  poison_a_key(isa, kernels, p, threads, out, lse, n);
  attend_together(isa, kernels, p, threads, n);
  attend_in_pages(isa, kernels, p, threads, n);

  AttentionBackwardParams bp{};
  bp.forward = p;
  if (n % 10 == 4) set_dropout(bp.forward, 0.3, static_cast<uint64_t>(n));
  bp.grad_out = grad_out.data(), bp.delta = delta.data();
  bp.grad_query = dq.data(), bp.grad_key = dk.data(), bp.grad_value = dv.data();
  bp.grad_out_strides = p.out_strides, bp.grad_query_strides = p.query_strides;
  bp.grad_key_strides = p.key_strides, bp.grad_value_strides = p.value_strides;
  const Tiling t = tile_rows(p);
  Guarded sums(rows * sums_width(p.head_dim) * aw), scores(rows * p.kv_len * aw);
  std::vector<int32_t> done(t.kv_heads * t.tiles);
  bp.grad_query_sums = sums.data(), bp.blocks_done = done.data(), bp.tiles = t.tiles;
  if (p.mask) bp.grad_scores = scores.data();
  run_backward(kernels, {&bp, 1}, threads);
  // Sums of dV over keys are those of P^T dO: with one allowed key a row, or many, each row's probabilities add up
  // to 1.
  bool finite = true;
  for (int64_t i = 0; i < rows * p.head_dim; ++i) finite &= std::isfinite(get(dq.data(), p.dtype, i));
  for (int64_t i = 0; i < keys * p.head_dim; ++i) finite &= std::isfinite(get(dk.data(), p.dtype, i));
  for (int64_t i = 0; i < keys * p.v_head_dim; ++i) finite &= std::isfinite(get(dv.data(), p.dtype, i));
  expect(finite || bp.forward.dtype == DType::kFloat16, isa, "gradient not finite", n);  // fp16 may overflow
  if (!p.sinks && bp.forward.dropout_p == 0 && w > 2) {
    double given = 0, got = 0;
    const auto* l = static_cast<const char*>(p.lse);
    for (int64_t r = 0; r < rows; ++r) {
      if (get(l, accumulation, r) == -kInf) continue;  // attends nothing
      for (int64_t d = 0; d < p.v_head_dim; ++d) given += get(grad_out.data(), p.dtype, r * p.v_head_dim + d);
    }
    for (int64_t i = 0; i < keys * p.v_head_dim; ++i) got += get(dv.data(), p.dtype, i);
    expect(std::fabs(given - got) < 1e-2 * std::sqrt(static_cast<double>(rows * p.v_head_dim)) + 1e-2, isa, "dv", n);
  }
}

void few_rows(const char* isa, const Kernels& kernels, int64_t n) {
  LinearParams p{};
  p.rows = pick(1, 16), p.inputs = kSizes[pick(0, 10)], p.outputs = kSizes[pick(0, 9)];
  p.dtype = static_cast<DType>(pick(1, 3));
  const size_t w = width(p.dtype);
  p.weight_stride = p.inputs;
  Guarded x(p.rows * p.inputs * w), weight(p.outputs * p.inputs * w), bias(p.outputs * w), out(p.rows * p.outputs * w);
  for (auto* g : {&x, &weight, &bias}) fill(*g, p.dtype);
  p.input = x.data(), p.weight = weight.data(), p.bias = n % 2 ? bias.data() : nullptr, p.out = out.data();
  Guarded scratch((kernels.linear_scratch(p) + 63) / 64 * 64);
  *static_cast<int64_t*>(scratch.data()) = 0;
  kernels.linear_rows(p, {0, p.outputs / 2}, scratch.data());
  kernels.linear_rows(p, {p.outputs / 2, p.outputs}, scratch.data());
  const int64_t r = pick(0, p.rows - 1), o = pick(0, p.outputs - 1);
  double wanted = p.bias ? get(p.bias, p.dtype, o) : 0;
  for (int64_t i = 0; i < p.inputs; ++i)
    wanted += get(p.input, p.dtype, r * p.inputs + i) * get(p.weight, p.dtype, o * p.inputs + i);
  expect(std::fabs(get(p.out, p.dtype, r * p.outputs + o) - wanted) < (w == 2 ? 0.02 : 1e-4) * (1 + std::fabs(wanted)),
         isa, "linear", n);
  bits.layers.add(out);

  RmsNormParams norm{};
  norm.dim = p.inputs, norm.dtype = p.dtype, norm.eps = 1e-6, norm.x = x.data(), norm.weight = weight.data();
  Guarded normed(p.rows * p.inputs * w);
  norm.out = normed.data();
  kernels.rms_norm_rows(norm, {0, p.rows});
  double squares = 0;
  for (int64_t i = 0; i < p.inputs; ++i) squares += std::pow(get(p.input, p.dtype, r * p.inputs + i), 2);
  const double first = get(p.input, p.dtype, r * p.inputs) * get(p.weight, p.dtype, 0) /
                       std::sqrt(squares / static_cast<double>(p.inputs) + 1e-6);
  expect(std::fabs(get(norm.out, p.dtype, r * p.inputs) - first) < (w == 2 ? 0.05 : 1e-3), isa, "rms_norm", n);

  SwigluParams gated{p.dtype, x.data(), normed.data(), nullptr};
  Guarded product(p.rows * p.inputs * w);
  gated.out = product.data();
  kernels.swiglu(gated, {0, p.rows * p.inputs});
  const int64_t at = r * p.inputs;
  const double gate = get(p.input, p.dtype, at), whole = gate / (1 + std::exp(-gate)) * get(norm.out, p.dtype, at);
  expect(std::fabs(get(gated.out, p.dtype, at) - whole) < (w == 2 ? 0.05 : 1e-3), isa, "swiglu", n);

  for (const int64_t bits : {4, 8}) {
    QuantizeParams rows{p.inputs, bits, p.dtype, x.data(), nullptr};
    Guarded bytes(p.rows * quantized_row_bytes(bits, p.inputs)), row(p.inputs * 4), back(p.rows * p.inputs * w);
    rows.to = bytes.data();
    kernels.quantize_rows(rows, {0, p.rows}, row.data());
    rows.from = bytes.data(), rows.to = back.data();
    kernels.dequantize_rows(rows, {0, p.rows}, row.data());
    double error = 0;
    for (int64_t i = 0; i < p.inputs; ++i)
      error += std::pow(get(back.data(), p.dtype, r * p.inputs + i) - get(p.input, p.dtype, r * p.inputs + i), 2);
    expect(error <= (bits == 8 ? 1e-3 : 0.1) * squares, isa, "quantize_rows", n);
  }
}

// A linear layer on stored weights: the input is rounded, the weights are those that widen_stored_rows writes.
void stored(const char* isa, const Kernels& kernels, int64_t n) {
  const StoredLayout& layout = kStoredLayouts[n % 8];
  const int64_t blocks = pick(1, 3);
  StoredLinearParams p{};
  p.rows = pick(1, 20), p.inputs = blocks * layout.numbers, p.outputs = kSizes[pick(0, 9)];
  p.format = layout.format, p.dtype = static_cast<DType>(pick(1, 3)), p.row_bytes = blocks * layout.bytes;
  const size_t w = width(p.dtype);
  Guarded x(p.rows * p.inputs * w), weight(p.outputs * p.row_bytes), bias(p.outputs * w), out(p.rows * p.outputs * w);
  Guarded rounded(p.rows * p.inputs / kRoundedBlock * static_cast<int64_t>(sizeof(RoundedBlock)));
  fill(x, p.dtype), fill(bias, p.dtype);
  auto* const bytes = static_cast<uint8_t*>(weight.data());
  for (int64_t i = 0; i < p.outputs * blocks; ++i)
    for (int64_t k = 0; k < layout.bytes; ++k) {
      // Scales are numbers of 16 bits in [2^-7, 2^-5): at the end of Q6_K's blocks, at the beginning of all others.
      const bool last = layout.format == StoredFormat::kQ6_K;
      const bool upper = last ? k == layout.bytes - 1 : k == 1 || k == 3;
      bytes[i * layout.bytes + k] = static_cast<uint8_t>(upper ? pick(0x20, 0x27) : pick(0, 255));
    }
  p.input = x.data(), p.weight = bytes, p.bias = n % 2 ? bias.data() : nullptr, p.out = out.data();
  p.rounded = static_cast<RoundedBlock*>(rounded.data());
  Guarded scratch((kernels.stored_linear_scratch(p) + 63) / 64 * 64 + 64);
  kernels.round_input(p, {0, p.rows});
  for (int64_t o = 0; o < p.outputs; o += kStoredOutputs)
    kernels.stored_linear_rows(p, {0, p.rows}, {o, std::min(o + kStoredOutputs, p.outputs)}, scratch.data());

  Guarded numbers(p.outputs * p.inputs * 4);
  kernels.widen_stored_rows({p.inputs, p.format, DType::kFloat32, bytes, p.row_bytes, numbers.data()}, {0, p.outputs});
  double worst = 0;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t o = 0; o < p.outputs; ++o) {
      double wanted = p.bias ? get(p.bias, p.dtype, o) : 0, size = std::fabs(wanted);
      for (int64_t b = 0; b < p.inputs; b += kRoundedBlock) {
        double top = 0;
        for (int64_t i = b; i < b + kRoundedBlock; ++i)
          top = std::max(top, std::fabs(get(p.input, p.dtype, r * p.inputs + i)));
        for (int64_t i = b; i < b + kRoundedBlock; ++i) {
          const double weighed = get(numbers.data(), DType::kFloat32, o * p.inputs + i);
          wanted += get(p.input, p.dtype, r * p.inputs + i) * weighed;
          size += std::fabs(weighed) * top / 254;  // at most half a step
        }
      }
      size += std::fabs(wanted) * (w == 2 ? 0x1p-8 : 0x1p-18);
      worst = std::max(worst, std::fabs(get(p.out, p.dtype, r * p.outputs + o) - wanted) / size);
    }
  expect(worst <= 1.001, isa, "stored linear", n);
  bits.stored.add(out);
}

// Linear attention: out and state are linear in the values and the initial state, so the products of these with their
// gradients add up to those of the results with theirs.
void recurrent(const char* isa, const Kernels& kernels, int64_t n) {
  LinearAttentionBackwardParams bp{};
  LinearAttentionParams& p = bp.forward;
  const int64_t group = pick(1, 2);
  p.sequences = pick(1, 2), p.num_key_heads = pick(1, 2), p.num_heads = group * p.num_key_heads;
  p.length = kSizes[pick(0, 9)], p.head_dim = kSizes[pick(0, 7)], p.v_head_dim = kSizes[pick(0, 7)];
  p.dtype = static_cast<DType>(pick(0, 3)), p.scale = 0.5, p.per_channel = n % 3 == 0;
  p.shared_heads = n % 2 ? group : 1;
  const DType wide = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const size_t w = width(p.dtype), aw = width(wide);
  const int64_t rows = p.sequences * p.num_heads * p.length, key_rows = rows / group, dim = p.head_dim;
  const int64_t values = rows * p.v_head_dim, states = p.sequences * p.num_heads * dim * p.v_head_dim;
  const int64_t decays = rows * (p.per_channel ? dim : 1);
  Guarded q(key_rows * dim * w), k(key_rows * dim * w), v(values * w), grad_out(values * w), out(values * w);
  Guarded first(states * aw), state(states * aw), grad_state(states * aw), decay(decays * aw), beta(rows * aw);
  for (auto* g : {&q, &k, &v, &grad_out}) fill(*g, p.dtype);
  for (auto* g : {&first, &grad_state, &decay}) fill(*g, wide);
  for (int64_t i = 0; i < decays; ++i) put(decay.data(), wide, i, -std::fabs(get(decay.data(), wide, i)));
  for (int64_t i = 0; i < rows; ++i) put(beta.data(), wide, i, 0.4 / static_cast<double>(dim));  // stays stable
  const auto strides = [&](int64_t heads, int64_t columns) {
    return Strides{heads * p.length * columns, p.length * columns, columns, 1};
  };
  p.query = q.data(), p.key = k.data(), p.value = v.data(), p.out = out.data(), p.state = state.data();
  p.query_strides = p.key_strides = strides(p.num_key_heads, dim);
  p.value_strides = p.out_strides = bp.grad_out_strides = strides(p.num_heads, p.v_head_dim);
  p.log_decay = n % 4 ? decay.data() : nullptr, p.per_channel &= p.log_decay != nullptr;
  p.log_decay_strides = strides(p.num_heads, p.per_channel ? dim : 1);
  p.beta = n % 5 ? beta.data() : nullptr, p.beta_strides = strides(p.num_heads, 1);
  p.initial_state = first.data();
  Guarded scratch((kernels.linear_attention_scratch(p) + 63) / 64 * 64);
  for (int64_t b = 0; b < p.sequences; ++b)
    for (int64_t h = 0; h < p.num_heads; h += p.shared_heads) kernels.linear_attention(p, b, h, scratch.data());

  const size_t kw = group == 1 ? w : aw;  // sums over value heads are wide
  Guarded dq(key_rows * dim * kw), dk(key_rows * dim * kw), dv(values * w), dg(decays * aw), db(rows * aw);
  Guarded ds(states * aw);
  bp.grad_out = grad_out.data(), bp.grad_state = grad_state.data(), bp.grad_query = dq.data();
  bp.grad_key = dk.data(), bp.grad_value = dv.data(), bp.grad_initial_state = ds.data();
  bp.grad_log_decay = p.log_decay ? dg.data() : nullptr, bp.grad_beta = p.beta ? db.data() : nullptr;
  Guarded more((kernels.linear_attention_backward_scratch(bp) + 63) / 64 * 64);
  for (int64_t b = 0; b < p.sequences; ++b)
    for (int64_t h = 0; h < p.num_key_heads; ++h) kernels.linear_attention_backward(bp, b, h, more.data());
  double difference = 0, size = 0;
  const auto add = [&](void* a, DType of_a, void* b, DType of_b, int64_t count, double sign) {
    for (int64_t i = 0; i < count; ++i) {
      const double product = get(a, of_a, i) * get(b, of_b, i);
      difference += sign * product, size += std::fabs(product);
    }
  };
  add(out.data(), p.dtype, grad_out.data(), p.dtype, values, 1);
  add(state.data(), wide, grad_state.data(), wide, states, 1);
  add(v.data(), p.dtype, dv.data(), p.dtype, values, -1);
  add(first.data(), wide, ds.data(), wide, states, -1);
  expect(std::fabs(difference) <= (w == 2 ? 1e-2 : 1e-4) * size, isa, "linear attention", n);
}

// A causal convolution: without an activation out and state are linear in x and the initial state.
void convolve(const char* isa, const Kernels& kernels, int64_t n) {
  CausalConv1dBackwardParams bp{};
  CausalConv1dParams& p = bp.forward;
  p.sequences = pick(1, 2), p.length = kSizes[pick(0, 9)], p.channels = kSizes[pick(0, 9)], p.taps = pick(1, 5);
  p.dtype = static_cast<DType>(pick(0, 3));
  const DType wide = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const size_t w = width(p.dtype), aw = width(wide);
  const int64_t rows = p.sequences * p.length * p.channels, held = p.sequences * (p.taps - 1) * p.channels;
  Guarded x(rows * w), out(rows * w), grad_out(rows * w), dx(rows * w);
  Guarded first(held * w), state(held * w), grad_state(held * w), ds(held * w);
  Guarded weight(p.channels * p.taps * aw), dw(p.sequences * p.channels * p.taps * aw);
  Guarded db(p.sequences * p.channels * aw);
  for (auto* g : {&x, &grad_out, &first, &grad_state}) fill(*g, p.dtype);
  fill(weight, wide);
  p.x = x.data(), p.x_batch_stride = p.length * p.channels, p.x_row_stride = p.channels;
  p.weight = weight.data(), p.initial_state = first.data(), p.out = out.data(), p.state = state.data();
  Guarded scratch((kernels.causal_conv1d_scratch(p) + 63) / 64 * 64);
  for (int64_t b = 0; b < p.sequences; ++b)
    for (int64_t c = 0; c < p.channels; c += kConvChannels)
      kernels.causal_conv1d(p, b, {0, p.length}, {c, std::min(c + kConvChannels, p.channels)}, scratch.data());
  bp.grad_out = grad_out.data(), bp.grad_state = grad_state.data(), bp.grad_x = dx.data();
  bp.grad_weight = dw.data(), bp.grad_bias = db.data(), bp.grad_initial_state = ds.data();
  Guarded more((kernels.causal_conv1d_backward_scratch(bp) + 63) / 64 * 64);
  for (int64_t b = 0; b < p.sequences; ++b)
    for (int64_t c = 0; c < p.channels; c += kConvChannels)
      kernels.causal_conv1d_backward(bp, b, {c, std::min(c + kConvChannels, p.channels)}, more.data());
  double difference = 0, size = 0;
  const auto add = [&](Guarded& a, Guarded& b, int64_t count, double sign) {
    for (int64_t i = 0; i < count; ++i) {
      const double product = get(a.data(), p.dtype, i) * get(b.data(), p.dtype, i);
      difference += sign * product, size += std::fabs(product);
    }
  };
  add(out, grad_out, rows, 1), add(state, grad_state, held, 1), add(x, dx, rows, -1), add(first, ds, held, -1);
  expect(std::fabs(difference) <= (w == 2 ? 1e-2 : 1e-4) * size, isa, "causal convolution", n);
}

}  // namespace

int main(int count, char** arguments) {
  const int64_t problems = count > 1 ? std::atoll(arguments[1]) : 100;
  for (const Isa& isa : kIsas) {
    if (!isa.present) {
      std::printf("%s: not on this CPU\n", isa.name);
      continue;
    }
    bits = AllBits();
    for (int64_t n = 0; n < problems; ++n) {
      generator.seed(static_cast<uint64_t>(n));  // so that every instruction set gets the same problems
      attend(isa.name, isa.kernels, n);
      few_rows(isa.name, isa.kernels, n);
      stored(isa.name, isa.kernels, n);
      recurrent(isa.name, isa.kernels, n);
      convolve(isa.name, isa.kernels, n);
    }
    std::printf("%s: %lld problems, attention %016llx, layers %016llx, stored %016llx\n", isa.name,
                static_cast<long long>(problems), static_cast<unsigned long long>(bits.attention.hash),
                static_cast<unsigned long long>(bits.layers.hash), static_cast<unsigned long long>(bits.stored.hash));
  }
  std::printf("%d failed\n", failures);
  return failures > 0;
}
