#include <attnpack/ops/cpu/isa/dot.h>
#include <attnpack/ops/cpu/isa/rounded_rows.h>
#include <attnpack/ops/cpu/isa/stored_blocks.h>
#include <attnpack/ops/cpu/isa/tile.h>

// Linear layers on stored weights. The input is rounded to 8 bits in blocks of 32. The codes of some outputs, one in
// each lane of a vector, are multiplied as integers: with few rows of the input as they come out of memory, with more
// rows from a panel in the L1 cache.
//   y = sum over blocks of  scale * scale_of_x * (codes . codes_of_x) + offset * sum_of_x
//     + sum over numbers of x that are kept of  (scale * code + offset) * x
namespace attnpack::ATTNPACK_ISA {

namespace {

// f(rows) with the number, 1 to kMost, as a constant.
template <int kMost, class F>
void with_rows(int64_t rows, F&& f) {
  if constexpr (kMost > 1)
    if (rows < kMost) return with_rows<kMost - 1>(rows, f);
  f(std::integral_constant<int, kMost>());
}

// f(an element of the dtype); the products know no fp64.
template <class F>
void dispatch_stored(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) return f(float{});
  if (dtype == DType::kBFloat16) return f(BFloat16{});
  f(Float16{});
}

#if defined(ATTNPACK_BYTE_PRODUCTS)
constexpr int kVectors = 2;
constexpr int64_t kOutputs = kVectors * kLanes<float>;  // of a panel
#else
constexpr int64_t kOutputs = 1;
#endif

template <class S>
void store_outputs(const StoredLinearParams& p, Range rows, int64_t output, int64_t count, const float* sums) {
  float bias[kOutputs] = {};
  for (int64_t i = 0; p.bias && i < count; ++i) bias[i] = load_one(static_cast<const S*>(p.bias) + output + i);
  for (int64_t r = rows.begin; r < rows.end; ++r, sums += kOutputs) {
    S* const out = static_cast<S*>(p.out) + r * p.outputs + output;
    for (int64_t i = 0; i < count; ++i) store_one(out + i, sums[i] + bias[i]);
  }
}

#if defined(ATTNPACK_BYTE_PRODUCTS)

// Most rows of the input that need no panel. For 5 and 6 rows of large blocks it would gain a tenth of the time, and
// cost a fifth of this file's to compile.
template <StoredFormat kFormat>
constexpr int kFewRows = kTogether<kFormat> > 1 ? kRowsTogether : static_cast<int>(smaller(4, kRowsTogether));
constexpr int64_t kMostRowBytes = kPanelInputs / 32 * 34;

// Fetches memory that is read next, a piece at a time, in the order of its addresses.
class Fetching {
 public:
  Fetching(const uint8_t* begin, int64_t bytes, int64_t pieces)
      : next_(begin), end_(begin + bytes), step_((bytes / larger(pieces, 1) + 63) / 64 * 64) {}
  // Always inlined: GCC takes a function that only prefetches for one without effects.
  [[gnu::always_inline]] void fetch() {
    const uint8_t* const stop = next_ + smaller(step_, end_ - next_);
    for (; next_ < stop; next_ += 64) fetch_once(next_);
  }

 private:
  const uint8_t *next_, *end_;
  int64_t step_;
};

// Codes [input / 4][vector] and, for each kScaled inputs, scales and offsets [vector].
struct Panel {
  const uint8_t** fetched;  // the weight's rows that were fetched ahead, at the start of scratch, which is zeroed
  uint8_t* codes;
  float *scales, *offsets;
  uint8_t* rest;            // fewer than kOutputs rows of the weight, with zeros after them
  float *sums, *kept_sums;  // [rows][kOutputs]: of the rounded numbers, of the kept ones
  Panel(int64_t rows, Arena& arena)
      : fetched(arena.take<const uint8_t*>(1)),
        codes(arena.take<uint8_t>(kPanelInputs * kOutputs)),
        scales(arena.take<float>(kPanelInputs / 16 * kOutputs)),
        offsets(arena.take<float>(kPanelInputs / 16 * kOutputs)),
        rest(arena.take<uint8_t>(kOutputs * kMostRowBytes)),
        sums(arena.take<float>(rows * kOutputs)),
        kept_sums(arena.take<float>(rows * kOutputs)) {}
};

// The properties of a format that products with a panel depend on. Several formats share them.
struct PanelCodes {
  int scaled;  // numbers that share a scale
  bool is_signed;
};
template <StoredFormat kFormat>
constexpr PanelCodes kPanelCodes{kScaled<kFormat>, kSigned<kFormat>};

// sum + the numbers of a vector of outputs for an input that was kept, times that input.
template <bool kIsSigned>
[[gnu::always_inline]] inline Floats add_kept(Floats sum, Bytes codes, Floats scale, Floats offset,
                                              const RoundedBlock& block) {
  const int byte = block.kept_at % 4;
  if (kIsSigned) {
    const Floats code = to_floats(Bytes(Words(Bits(codes) << (24 - 8 * byte)) >> 24));
    return multiply_add(scale * code, all_of(block.kept), sum);
  }
  const Floats code = to_floats(bits_of(Bytes(Bits(codes) >> (8 * byte)), 255));
  return multiply_add(multiply_add(scale, code, offset), all_of(block.kept), sum);
}

// Where unpack_blocks puts the codes of a vector of outputs.
template <int kScaledNumbers>
struct PanelColumn {
  const Panel& panel;
  int64_t input;
  int vector;
  [[gnu::always_inline]] void put_codes(int i, Bytes codes) const {
    store_bytes(panel.codes + ((input / 4 + i) * kVectors + vector) * kVectorBytes, codes);
  }
  [[gnu::always_inline]] void put_scale(int i, Floats scale, Floats offset) const {
    const int64_t at = ((input / kScaledNumbers + i) * kVectors + vector) * kLanes<float>;
    store_floats(panel.scales + at, scale);
    store_floats(panel.offsets + at, offset);
  }
};

// The codes of kOutputs rows of the weight.
template <StoredFormat kFormat>
[[gnu::noinline]] void fill_panel(const uint8_t* p, int64_t row_bytes, int64_t inputs, Fetching& ahead,
                                  const Panel& panel) {
  constexpr int64_t kNumbers = kLayout<kFormat>.numbers, kBytes = kLayout<kFormat>.bytes;
  for_blocks<kFormat>(inputs / kNumbers, [&](int64_t block, auto count) ATTNPACK_INLINED {
#pragma GCC unroll 1
    for (int v = 0; v < kVectors; ++v) {
      ahead.fetch();
      PanelColumn<kScaled<kFormat>> to{panel, block * kNumbers, v};
      unpack_blocks<kFormat, count>(p + v * kLanes<float> * row_bytes + block * kBytes, row_bytes, to);
    }
  });
}

// The products of a vector of outputs with few rows of the input, block by block, as the codes come out of memory.
template <StoredFormat kFormat, int kBlocks, int kRows>
struct RowProducts {
  static constexpr int kParts = kBlocks * kLayout<kFormat>.numbers / kScaled<kFormat>, kGroups = kScaled<kFormat> / 4;
  const RoundedBlock* x;  // [kBlocks * numbers / 32][kRows]
  Bytes all[kBlocks * kLayout<kFormat>.numbers / 4];
  Floats scale[kParts], offset[kParts];
  Bytes sum[kParts][kRows];
  [[gnu::always_inline]] void put_codes(int i, Bytes codes) {
    all[i] = codes;
    unrolled<kRows>([&](auto r) ATTNPACK_INLINED {
      int32_t four;
      __builtin_memcpy(&four, x[i / 8 * kRows + r].codes + i % 8 * 4, 4);
      Bytes& to = sum[i / kGroups][r];
      to = kSigned<kFormat> ? add_signed_products(to, codes, all_of(four)) : add_products(to, codes, all_of(four));
    });
  }
  [[gnu::always_inline]] void put_scale(int i, Floats of_codes, Floats added) {
    scale[i] = of_codes;
    offset[i] = added;
    unrolled<kRows>([&](auto r) ATTNPACK_INLINED { sum[i][r] = Bytes{}; });
  }
  // In the order of multiply_panel.
  [[gnu::always_inline]] void add_to(Floats (&total)[kRows]) const {
    unrolled<kParts>([&](auto part) ATTNPACK_INLINED {
      unrolled<kRows>([&](auto r) ATTNPACK_INLINED {
        const RoundedBlock& block = x[part * kScaled<kFormat> / kRoundedBlock * kRows + r];
        const float sum_of_x = kScaled<kFormat> == kRoundedBlock ? block.sum : block.half[part % 2];
        total[r] = multiply_add(to_floats(sum[part][r]), scale[part] * all_of(block.scale), total[r]);
        if (!kSigned<kFormat>) total[r] = multiply_add(offset[part], all_of(sum_of_x), total[r]);
      });
    });
  }
  [[gnu::always_inline]] void add_kept_to(Floats (&total)[kRows]) const {
#pragma GCC unroll 1
    for (int i = 0; i < kBlocks * kLayout<kFormat>.numbers / kRoundedBlock; ++i) {
      int all_signs = -1;
      for (int r = 0; r < kRows; ++r) all_signs &= x[i * kRows + r].kept_at;
      if (all_signs < 0) continue;
#pragma GCC unroll 1
      for (int r = 0; r < kRows; ++r) {
        const RoundedBlock& block = x[i * kRows + r];
        if (block.kept_at < 0) continue;
        const int64_t at = i * kRoundedBlock + block.kept_at % kRoundedBlock, part = at / kScaled<kFormat>;
        total[r] = add_kept<kSigned<kFormat>>(total[r], all[at / 4], scale[part], offset[part], block);
      }
    }
  }
};

// Blocks in one go: fewer for more rows, because the time to compile grows faster than the code.
template <StoredFormat kFormat, int kRows>
constexpr int kFewTogether = kRows > 2 && kTogether<kFormat> > 2 ? 2 : kTogether<kFormat>;

// Most rows for which a row of the weight may end with blocks that do not come together.
constexpr int kRowsWithRest = 2;

// sums[r, o] = the products of kOutputs rows of the weight with few rows of the input: a panel would cost more.
template <StoredFormat kFormat, int kRows>
[[gnu::noinline]] void multiply_few_rows(const uint8_t* p, int64_t row_bytes, const RoundedBlock* x, int64_t inputs,
                                         Fetching& ahead, float* sums) {
  constexpr int64_t kNumbers = kLayout<kFormat>.numbers, kBytes = kLayout<kFormat>.bytes;
  for (int64_t v = 0; v < kVectors; ++v) {
    Floats total[kRows] = {}, of_kept[kRows] = {};
    const uint8_t* const first = p + v * kLanes<float> * row_bytes;
    for_blocks<kFormat, kFewTogether<kFormat, kRows>, (kRows <= kRowsWithRest)>(
        inputs / kNumbers, [&](int64_t block, auto count) ATTNPACK_INLINED {
          ahead.fetch();
          RowProducts<kFormat, count, kRows> products;
          products.x = x + block * (kNumbers / kRoundedBlock) * kRows;
          unpack_blocks<kFormat, count>(first + block * kBytes, row_bytes, products);
          products.add_to(total);
          products.add_kept_to(of_kept);
        });
    for (int r = 0; r < kRows; ++r) store_floats(sums + r * kOutputs + v * kLanes<float>, total[r] + of_kept[r]);
  }
}

// sums[r, o] (+)= the products of a panel with some rows. Each sum takes its terms in one order, whatever Rows is.
template <PanelCodes kCodes, int Rows>
[[gnu::noinline]] void multiply_panel(const Panel& panel, const RoundedBlock* x, int64_t blocks, bool further,
                                      float* sums) {
  constexpr int kParts = 32 / kCodes.scaled, kGroups = kCodes.scaled / 4, kChains = Rows == 1 ? 2 : 1;
  Floats total[Rows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      total[r][v] = further ? load_floats(sums + r * kOutputs + v * kLanes<float>) : Floats{};
  const uint8_t* codes = panel.codes;
  const float *scales = panel.scales, *offsets = panel.offsets;
  for (int64_t b = 0; b < blocks; ++b, x += Rows) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Bytes sum[kChains][Rows][kVectors];
#pragma GCC unroll 2
      for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[c][r][v] = Bytes{};
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        Bytes code[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) code[v] = load_bytes(codes + (g * kVectors + v) * kVectorBytes);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
          int32_t four;
          __builtin_memcpy(&four, x[r].codes + (part * kGroups + g) * 4, 4);
          const Bytes of_x = all_of(four);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            Bytes& to = sum[g % kChains][r][v];
            to = kCodes.is_signed ? add_signed_products(to, code[v], of_x) : add_products(to, code[v], of_x);
          }
        }
      }
      codes += kGroups * kVectors * kVectorBytes;
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const Floats scale_of_x = all_of(x[r].scale), sum_of_x = all_of(kParts == 1 ? x[r].sum : x[r].half[part]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const Bytes whole = kChains == 1 ? sum[0][r][v] : add(sum[0][r][v], sum[kChains - 1][r][v]);
          const Floats scale = load_floats(scales + v * kLanes<float>);
          total[r][v] = multiply_add(to_floats(whole), scale * scale_of_x, total[r][v]);
          if (!kCodes.is_signed)
            total[r][v] = multiply_add(load_floats(offsets + v * kLanes<float>), sum_of_x, total[r][v]);
        }
      }
      scales += kOutputs;
      offsets += kOutputs;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store_floats(sums + r * kOutputs + v * kLanes<float>, total[r][v]);
}

template <PanelCodes kCodes>
void multiply_rows(const Panel& panel, const RoundedBlock* x, int64_t rows, int64_t blocks, bool further, float* sums) {
  with_rows<kRowsTogether>(rows, [&](auto count) { multiply_panel<kCodes, count>(panel, x, blocks, further, sums); });
}

// sums[r, o] += the products of a panel with the numbers of some rows that were kept. One loop for all rows, because
// each end of a loop of few rounds costs as much as some rounds.
template <PanelCodes kCodes>
[[gnu::noinline]] void multiply_kept(const Panel& panel, const RoundedBlock* x, int64_t count, float* sums) {
  for (int64_t first = 0; first < count; first += kMarks)
    for (uint32_t left = x[first / kMarks].marks; left != 0; left &= left - 1) {
      const RoundedBlock& block = x[first + __builtin_ctz(left)];
      const int64_t part = block.kept_at / kCodes.scaled;
      float* const to = sums + block.row * kOutputs;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = part * kOutputs + v * kLanes<float>;
        const Bytes codes = load_bytes(panel.codes + (block.kept_at / 4 * kVectors + v) * kVectorBytes);
        store_floats(to + v * kLanes<float>, add_kept<kCodes.is_signed>(load_floats(to + v * kLanes<float>), codes,
                                                                        load_floats(panel.scales + at),
                                                                        load_floats(panel.offsets + at), block));
      }
    }
}

template <StoredFormat kFormat>
void compute_outputs(const StoredLinearParams& p, Range rows, int64_t output, void* scratch) {
  Arena arena(scratch);
  const Panel panel(rows.end - rows.begin, arena);
  const int64_t count = smaller(kOutputs, p.outputs - output), panel_bytes = kOutputs * p.row_bytes;
  const uint8_t* const weight = p.weight + output * p.row_bytes;
  const bool is_last = output + kOutputs >= p.outputs;
  const uint8_t* const next = is_last ? p.following : weight + panel_bytes;
  if (*panel.fetched != weight) Fetching(weight, count * p.row_bytes, 1).fetch();
  Fetching ahead(next, next ? panel_bytes : 0, p.inputs / (kLayout<kFormat>.numbers * kTogether<kFormat>)*kVectors);
  *panel.fetched = next;
  const auto store = [&] {
    dispatch_stored(p.dtype, [&](auto s) { store_outputs<decltype(s)>(p, rows, output, count, panel.sums); });
  };
  constexpr int kPaired = kFewTogether<kFormat, kRowsWithRest + 1>;
  const int few = p.inputs / kLayout<kFormat>.numbers % kPaired == 0 ? kFewRows<kFormat> : kRowsWithRest;
  if (rows.end - rows.begin <= few && count == kOutputs) {
    const RoundedTile x(p, rows.begin);
    with_rows<kFewRows<kFormat>>(x.rows, [&](auto few) {
      multiply_few_rows<kFormat, few>(weight, p.row_bytes, x.first, p.inputs, ahead, panel.sums);
    });
    return store();
  }
  __builtin_memset(panel.kept_sums, 0, (rows.end - rows.begin) * kOutputs * sizeof(float));
  for (int64_t input = 0; input < p.inputs; input += kPanelInputs) {
    const int64_t inputs = smaller(kPanelInputs, p.inputs - input);
    const int64_t first = input / kLayout<kFormat>.numbers * kLayout<kFormat>.bytes,
                  bytes = inputs / kLayout<kFormat>.numbers * kLayout<kFormat>.bytes;
    const uint8_t* from = weight + first;
    if (count == kOutputs) {
      fill_panel<kFormat>(from, p.row_bytes, inputs, ahead, panel);
    } else {
      for (int64_t r = 0; r < kOutputs; ++r)
        if (r < count)
          __builtin_memcpy(panel.rest + r * bytes, from + r * p.row_bytes, bytes);
        else
          __builtin_memset(panel.rest + r * bytes, 0, bytes);
      fill_panel<kFormat>(panel.rest, bytes, inputs, ahead, panel);
    }
    for (int64_t r = rows.begin, some; r < rows.end; r += some) {
      const RoundedTile tile(p, r);
      some = tile.rows;
      const RoundedBlock* const x = tile.first + input / kRoundedBlock * some;
      const int64_t at = (r - rows.begin) * kOutputs;
      multiply_rows<kPanelCodes<kFormat>>(panel, x, some, inputs / kRoundedBlock, input > 0, panel.sums + at);
      multiply_kept<kPanelCodes<kFormat>>(panel, x, some * inputs / kRoundedBlock, panel.kept_sums + at);
    }
  }
  for (int64_t i = 0; i < (rows.end - rows.begin) * kOutputs; ++i) panel.sums[i] += panel.kept_sums[i];
  store();
}

#else

struct Panel {
  float *numbers, *sums;
  Panel(int64_t rows, Arena& arena) : numbers(arena.take<float>(256)), sums(arena.take<float>(rows * kOutputs)) {}
};

// Where no instruction multiplies bytes: the numbers of one output times those of each row.
template <StoredFormat kFormat>
void compute_outputs(const StoredLinearParams& p, Range rows, int64_t output, void* scratch) {
  Arena arena(scratch);
  const Panel panel(rows.end - rows.begin, arena);
  constexpr int64_t kNumbers = kLayout<kFormat>.numbers, kBytes = kLayout<kFormat>.bytes;
  for (int64_t r = rows.begin; r < rows.end; ++r) panel.sums[r - rows.begin] = 0;
  for (int64_t i = 0; i < p.inputs / kNumbers; ++i) {
    read_block<kFormat>(p.weight + output * p.row_bytes + i * kBytes, panel.numbers);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const RoundedTile x(p, r);
      for (int64_t b = 0; b < kNumbers / kRoundedBlock; ++b) {
        const RoundedBlock& block = x.at(i * (kNumbers / kRoundedBlock) + b, r % kRowsTogether);
        float sum = 0;
        for (int64_t k = 0; k < kRoundedBlock; ++k)
          sum += panel.numbers[b * kRoundedBlock + k] * static_cast<float>(block.codes[k]);
        panel.sums[r - rows.begin] += sum * block.scale;
        if (block.kept_at >= 0)
          panel.sums[r - rows.begin] += panel.numbers[b * kRoundedBlock + block.kept_at % kRoundedBlock] * block.kept;
      }
    }
  }
  dispatch_stored(p.dtype, [&](auto s) { store_outputs<decltype(s)>(p, rows, output, 1, panel.sums); });
}

#endif

template <StoredFormat kFormat, class S>
void widen_rows(const StoredRowsParams& p, Range rows) {
  constexpr int64_t kNumbers = kLayout<kFormat>.numbers, kBytes = kLayout<kFormat>.bytes;
  float numbers[kNumbers];
  for (int64_t r = rows.begin; r < rows.end; ++r)
    for (int64_t i = 0; i < p.inputs / kNumbers; ++i) {
      read_block<kFormat>(p.rows + r * p.row_bytes + i * kBytes, numbers);
      S* const to = static_cast<S*>(p.out) + r * p.inputs + i * kNumbers;
      for (int64_t k = 0; k < kNumbers; ++k) store_one(to + k, numbers[k]);
    }
}

}  // namespace

bool has_byte_products() { return kByteProducts; }

size_t stored_linear_scratch(const StoredLinearParams& p) {
  Arena arena(nullptr);
  Panel(smaller(kStoredRows, p.rows), arena);
  return arena.used();
}

void round_input(const StoredLinearParams& p, Range rows) {
  dispatch_stored(p.dtype, [&](auto s) {
    for (int64_t r = rows.begin; r < rows.end; ++r) round_row<decltype(s)>(p, r);
  });
}

void stored_linear_rows(const StoredLinearParams& p, Range rows, Range outputs, void* scratch) {
  with_format(p.format, [&](auto format) {
    for (int64_t o = outputs.begin; o < outputs.end; o += kOutputs) compute_outputs<format>(p, rows, o, scratch);
  });
}

void widen_stored_rows(const StoredRowsParams& p, Range rows) {
  with_format(p.format, [&](auto format) {
    if (p.dtype == DType::kFloat64) return widen_rows<format, double>(p, rows);
    dispatch_stored(p.dtype, [&](auto s) { widen_rows<format, decltype(s)>(p, rows); });
  });
}

}  // namespace attnpack::ATTNPACK_ISA
