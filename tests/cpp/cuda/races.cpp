// The kernels' own source under ThreadSanitizer, one CUDA thread a fiber (cuda_races.h): no access races with another.
// A barrier too few need not show in results: this finds it whatever the drawn schedule was.
//
//   cuda_races [share I N] runs all kernels, or each N-th from the I-th; the exit code is 5 if there is a race
//   cuda_races mutants [PART]  leaves out each barrier, warp barrier, wait and fence in turn, demands a race: minutes;
//                          PART: only in files with that in their names
//   cuda_races without SITE  leaves out one, as FILE:LINE, and prints the races

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>

#define CHECK(condition) ((condition) ? void() : fail_check(#condition))
[[noreturn]] static void fail_check(const char* condition) {
  std::fprintf(stderr, "failed: %s\n", condition);
  std::abort();
}

#include "cuda_packed.h"
#include "cuda_run.h"

#include <attnpack/ops/cuda/kernels/linear.cuh>
#include <attnpack/ops/cuda/kernels/place.cuh>
#include <attnpack/ops/cuda/kernels/quantize.cuh>

using namespace attnpack;
using namespace attnpack::cuda;

static int reports = 0;
static bool stops_at_a_report = false;
extern "C" void __tsan_on_report(void*) {
  ++reports;
  if (stops_at_a_report) _exit(3);
}
extern "C" const char* __tsan_default_options() {
  return "halt_on_error=0:exitcode=5:history_size=4:suppress_equal_stacks=0:report_atomic_races=0";
}

namespace {

constexpr Device kSmall{2, 227 * 1024}, kSm90{1, 227 * 1024, true}, kManySm90{132, 227 * 1024, true};

template <class S>
void attend(const Shape& shape, const Settings& on, const Device& device = kSmall) {
  Problem<S> x(shape, on, 1);
  run_forward_guarded<S>(x.p, plan_forward(x.p, x.most_group, device), 1);
}
template <class S>
void differentiate(const Shape& shape, const Settings& on, const Device& device = kSmall, bool poisoned_rows = false) {
  Problem<S> x(shape, on, 2);
  for (int64_t i = 0; poisoned_rows && i < shape.q_len; i += 3) {
    narrow(std::nanf(""), &x.query.at(0, 0, i, i % shape.head_dim));
    narrow(std::nanf(""), &x.grad_out.at(0, 0, i, i % shape.v_head_dim));
  }
  x.delta.assign(x.lse.size(), 0);
  x.grad_scores.assign(x.lse.size() * x.shape.kv_len, 0);
  if (!device.sm90) x.bp.grad_scores = x.grad_scores.data();
  x.bp.delta = x.delta.data();
  run_backward_guarded<S>(x.bp, plan_backward(x.bp, x.most_group, device), 2);
}

void attend_pages() {
  Problem<BFloat16> x({1, 1, 4, 2, 150, 64, 64}, {.causal = true}, 3);
  const int64_t page = 16, pages = 10;
  std::vector<int32_t> table(pages);
  for (int64_t i = 0; i < pages; ++i) table[i] = static_cast<int32_t>((i * 7 + 3) % pages);
  Tensor4<BFloat16> keys(pages, 1, page, 64), values(pages, 1, page, 64);
  std::memset(keys.data(), 0, pages * page * 128);
  std::memset(values.data(), 0, pages * page * 128);
  x.p.key = keys.data();
  x.p.value = values.data();
  x.p.key_strides = x.p.value_strides = keys.strides;
  x.p.block_table = table.data();
  x.p.page_size = page;
  x.p.num_pages = x.p.table_stride = pages;
  run_forward_guarded<BFloat16>(x.p, plan_forward(x.p, 4, kSmall), 3);
}

// Packed sequences, some without queries or keys, one of NaN. page_size: of keys in pages, or 0.
struct BrokenPacked : PackedProblem<BFloat16> {
  BrokenPacked()
      : PackedProblem({{70, 90}, {0, 20}, {3, 0}, {40, 70}}, {1, 1, 1, 0, 0, 64, 64}, {.causal = true}, Offset::kAtEnd,
                      4) {
    break_sequence(3);
  }
};
void attend_packed(const Device& device, int64_t page_size = 0) {
  BrokenPacked x;
  if (page_size) x.use_pages(page_size);
  run_forward_guarded<BFloat16>(x.p, plan_forward(x.p, x.most_group, device), 4);
}
void differentiate_packed(const Device& device) {
  BrokenPacked x;
  run_backward_guarded<BFloat16>(x.bp, plan_backward(x.bp, x.most_group, device), 4);
}

// Lists more steps than a warp has lanes.
void list_many_steps() {
  Problem<BFloat16> x({1, 1, 1, 2, 34 * 64, 64, 64}, {.bool_mask = true}, 5);
  const MaskBits bits = plan_mask_bits(x.p, 0);
  const MaskLists lists = plan_key_lists(x.p, 1, 64, end_of(bits));
  Guarded workspace(end_of(lists));
  run_pack_mask(x.p, bits, workspace.data(), 5);
  run_list_keys(x.p, bits, lists, 128, workspace.data(), 5);
}

template <int Bits>
void attend_quantized() {
  Problem<Float16> x({1, 1, 4, 2, 150, 64, 64}, {.causal = true}, 4);
  const int64_t bytes = quantized_row_bytes(Bits, 64);
  std::vector<unsigned char> rows((150 * bytes + 31) / 16 * 16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<unsigned char>(i * 37 % 61);
  auto* first = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(rows.data()) + 15) / 16 * 16);
  x.p.key = x.p.value = first;
  x.p.key_strides = x.p.value_strides = {0, 0, bytes, 1};
  x.p.quantized_bits = Bits;
  run_forward_guarded<Float16>(x.p, plan_forward(x.p, 4, kSmall), 4);
}

void place() {
  const int64_t length = 3, capacity = 8, dim = 32;
  std::vector<float> query(4 * length * dim), key(2 * length * dim), rotated(query.size()), cache(2 * capacity * dim),
      other(cache.size());
  std::vector<double> inv_freq(dim / 2, 0.1);
  int64_t held = 2;
  PlaceParams p{};
  p.batch = 1;
  p.tokens = p.new_positions = length;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = p.v_head_dim = dim;
  p.capacity = capacity;
  p.rotates = true;
  p.half = dim / 2;
  p.factor = 1;
  p.inv_freq = inv_freq.data();
  p.query = query.data();
  p.key = p.value = key.data();
  p.rotated = rotated.data();
  p.cache_key = cache.data();
  p.cache_value = other.data();
  p.query_strides = p.rotated_strides = p.key_strides = p.value_strides = {0, length * dim, dim, 1};
  p.cache_key_strides = p.cache_value_strides = {0, capacity * dim, dim, 1};
  p.lengths = &held;
  p.lengths_stride = 1;
  run_blocks<PlaceShared>(length, kPlaceThreads, 5, [&](int64_t i, void* shared) {
    place_block<float, true>(p, i, *static_cast<PlaceShared*>(shared));
  });
}

void quantize() {
  std::vector<float> x(5 * 64, 0.5f), back(x.size()), rotated(x.size());
  std::vector<unsigned char> rows(5 * quantized_row_bytes(4, 64));
  const auto run = [&](RowsTo to, const void* from, void* result) {
    const QuantizeParams p{64, 4, DType::kFloat32, from, result};
    run_blocks<QuantizeShared>(2, kQuantizeThreads, 6, [&](int64_t i, void* shared) {
      quantize_block<float>(p, to, 5, i, *static_cast<QuantizeShared*>(shared));
    });
  };
  run(RowsTo::kBytes, x.data(), rows.data());
  run(RowsTo::kNumbers, rows.data(), back.data());
  run(RowsTo::kRotated, x.data(), rotated.data());
}

void rotate() {
  const int64_t heads = 2, length = 3, dim = 140, half = 65;
  std::vector<float> x(heads * length * dim, 0.5f), out(x.size()), table(length * half, 0.1f);
  RopeParams p{};
  p.batch = 1;
  p.num_heads = heads;
  p.length = length;
  p.dim = dim;
  p.half = half;
  p.x = x.data();
  p.cos = p.sin = table.data();
  p.out = out.data();
  p.x_strides = p.out_strides = {0, length * dim, dim, 1};
  p.cos_strides = p.sin_strides = {0, 0, half, 1};
  run_blocks<char>(heads * length, kRopeThreads, 7, [&](int64_t i, void*) { rotate_row<float, float>(p, i); });
}

void multiply_few_rows() {
  const int64_t rows = 3, inputs = 264, outputs = 9;
  std::vector<float> x(rows * inputs, 0.5f), weight(outputs * inputs, 0.1f), bias(outputs, 1), out(rows * outputs);
  LinearParams p{};
  p.rows = rows;
  p.inputs = p.weight_stride = inputs;
  p.outputs = outputs;
  p.input = x.data();
  p.weight = weight.data();
  p.bias = bias.data();
  p.out = out.data();
  run_blocks<char>((outputs + 3) / 4, kLinearThreads, 8, [&](int64_t i, void*) { linear_block<float>(p, i); });
}

// Small calls that reach every barrier: several steps, several parts, and the second pass that NaN asks for.
const std::map<std::string, std::function<void()>> kRuns{
    {"prefill 64", [] { attend<BFloat16>({1, 1, 1, 64, 150, 64, 64}, {.causal = true, .poison = true}); }},
    {"prefill 64 with a mask",
     [] { attend<BFloat16>({1, 1, 1, 64, 150, 64, 64}, {.bool_mask = true, .poison = true}); }},
    {"prefill 256", [] { attend<Float16>({1, 1, 1, 20, 70, 256, 256}, {.causal = true}); }},
    {"prefill without keys", [] { attend<Float16>({1, 1, 1, 20, 1, 256, 256}, {.lens = true}); }},
    {"prefill on sm_90", [] { attend<BFloat16>({1, 1, 1, 70, 420, 64, 64}, {.causal = true, .poison = true}, kSm90); }},
    {"prefill 256 on sm_90",
     [] { attend<Float16>({1, 1, 1, 20, 60, 256, 256}, {.causal = true, .poison = true}, kSm90); }},
    {"prefill by three warpgroups",
     [] { attend<BFloat16>({1, 1, 1, 180, 300, 64, 64}, {.causal = true, .poison = true}, kSm90); }},
    {"prefill by three warpgroups, no NaN", [] { attend<BFloat16>({1, 1, 1, 180, 300, 64, 64}, {}, kSm90); }},
    {"masked prefill on sm_90",
     [] {
       attend<BFloat16>({1, 1, 1, 70, 520, 64, 64}, {.bool_mask = true, .mask_rows = true, .mask_blocks = true}, kSm90);
     }},
    {"masked prefill on sm_90, NaN",
     [] {
       attend<BFloat16>({1, 1, 1, 70, 520, 64, 64}, {.bool_mask = true, .poison = true, .mask_blocks = true}, kSm90);
     }},
    // In two parts of four steps: the two stages are used again.
    {"prefill on sm_90, no NaN", [] { attend<BFloat16>({1, 1, 1, 70, 800, 64, 64}, {}, kSm90); }},
    {"lists of many steps", list_many_steps},
    {"decode", [] { attend<BFloat16>({1, 1, 4, 2, 600, 64, 64}, {.causal = true, .poison = true}, {8, 227 * 1024}); }},
    {"decode without keys", [] { attend<Float16>({1, 1, 1, 2, 1, 256, 256}, {.lens = true}, {8, 227 * 1024}); }},
    {"packed prefill", [] { attend_packed(kSmall); }},
    {"packed prefill in pages", [] { attend_packed(kSmall, 16); }},
    {"packed prefill on sm_90", [] { attend_packed(kSm90); }},
    {"packed backward", [] { differentiate_packed(kSmall); }},
    {"packed backward on sm_90", [] { differentiate_packed(kSm90); }},
    {"decode in pages", attend_pages},
    {"decode of 8 bits", attend_quantized<8>},
    {"decode of 4 bits", attend_quantized<4>},
    {"latent, 16 rows",
     [] { attend<BFloat16>({1, 1, 16, 1, 70, 576, 512}, {.bool_mask = true, .poison = true, .latent = true}); }},
    {"latent on sm_90",
     [] { attend<BFloat16>({1, 1, 16, 2, 200, 576, 512}, {.causal = true, .poison = true, .latent = true}, kSm90); }},
    {"latent on sm_90, no NaN", [] { attend<BFloat16>({1, 1, 16, 1, 150, 576, 512}, {.latent = true}, kSm90); }},
    {"latent, 64 rows", [] { attend<BFloat16>({1, 1, 20, 1, 40, 576, 512}, {.latent = true}); }},
    {"exact", [] { attend<float>({1, 1, 1, 5, 70, 40, 40}, {.causal = true}); }},
    {"exact, head_dim 0", [] { attend<float>({1, 1, 1, 5, 70, 0, 40}, {.causal = true}); }},
    {"backward 64", [] { differentiate<BFloat16>({1, 1, 1, 66, 140, 64, 64}, {.causal = true, .poison = true}); }},
    {"backward 256", [] { differentiate<Float16>({1, 1, 1, 20, 40, 256, 256}, {.causal = true}); }},
    {"backward on sm_90",
     [] { differentiate<BFloat16>({1, 1, 2, 70, 200, 64, 64}, {.causal = true, .poison = true}, kSm90); }},
    {"backward on sm_90, NaN rows",
     [] { differentiate<BFloat16>({1, 1, 1, 200, 200, 64, 64}, {.causal = true}, kSm90, true); }},
    {"backward on sm_90, NaN once",
     [] { differentiate<BFloat16>({1, 1, 1, 60, 70, 64, 64}, {.causal = true}, kSm90, true); }},
    {"backward of 192 on sm_90",
     [] { differentiate<Float16>({1, 1, 1, 70, 100, 192, 128}, {.causal = true, .poison = true}, kSm90); }},
    {"backward on sm_90 under rules",
     [] {
       differentiate<BFloat16>({1, 1, 2, 70, 140, 64, 64},
                               {.causal = true, .softcap = true, .alibi = true, .dropout = true, .poison = true},
                               kSm90);
     }},
    {"masked backward on sm_90",
     [] {
       differentiate<BFloat16>({1, 1, 2, 70, 260, 64, 64}, {.bool_mask = true, .mask_rows = true, .mask_blocks = true},
                               kSm90);
     }},
    {"masked backward on sm_90, NaN",
     [] {
       differentiate<BFloat16>({1, 1, 2, 40, 140, 64, 64}, {.bool_mask = true, .poison = true, .mask_rows = true},
                               kSm90, true);
     }},
    {"backward on sm_90, no NaN", [] { differentiate<BFloat16>({1, 1, 1, 140, 150, 64, 64}, {}, kSm90); }},
    {"backward on sm_90 in parts",
     [] { differentiate<BFloat16>({1, 1, 3, 180, 70, 64, 64}, {.causal = true, .poison = true}, kManySm90, true); }},
    {"exact backward", [] { differentiate<float>({1, 1, 1, 40, 40, 40, 40}, {.causal = true}); }},
    {"exact backward, head_dim 0", [] { differentiate<float>({1, 1, 1, 40, 40, 0, 0}, {.causal = true}); }},
    {"append and rotate", place},
    {"quantise", quantize},
    {"rotate", rotate},
    {"few-row linear", multiply_few_rows},
};

// Barriers that may be left out where they stand, or whose race is not seen, each by a piece of its line or of the line
// before it.
struct Equivalent {
  const char *file, *text, *why;
};
constexpr const char* kConverges = "equivalent: no lane reads what another wrote; products want all lanes at once";
constexpr const char* kTurns = "equivalent: turns are for speed, and nothing passes from one warpgroup to the other";
constexpr const char* kNotSeen = "not seen: GCC's ThreadSanitizer leaves out the store of a call's result";
constexpr const char* kSecondTurn =
    "equivalent: the last step of the second turn is on stage 1, where no result goes; cleaning waits for the rest";
const Equivalent kEquivalent[] = {
    {"forward_mma.cuh", "sync_warp();", kConverges},
    {"forward_latent.cuh", "sync_warp();", kConverges},
    {"backward_mma.cuh", "}\n    sync_warp();", kConverges},
    {"panels_sm90.cuh", "sync_warp();", kConverges},
    {"forward_sm90.cuh", "(in_turn) sync", kTurns},
    {"forward_sm90.cuh", "(in_turn && group_ == 0) sync", kTurns},
    {"forward_sm90.cuh", "auto& end = shared_.end;\n", kSecondTurn},
    {"forward_mma.cuh", "tile.unit = unit_of", kNotSeen},
    {"forward_sm90.cuh", "tile.unit = unit_of", kNotSeen},
    {"latent_sm90.cuh", "tile.unit = unit_of", kNotSeen},
    {"forward_sm90.cuh", "}\n    sync_block();",
     "equivalent: load_query waits for all before anybody reads the ranges"},
};

// The detector itself: without these there must be a race in a run.
struct Detected {
  const char *file, *source, *run;
};
const Detected kDetected[] = {
    {"tiles.cuh", "copy_async_wait<1>();\n    sync_block();", "decode"},
    {"forward_sm90.cuh", "copy_async_wait<0>();\n    fence_stores();", "prefill on sm_90, no NaN"},
};

std::string source_of(const std::string& site) {
  const size_t colon = site.rfind(':');
  const std::string name = site.substr(0, colon), folder = name.find("sm90") == name.npos ? "/" : "/sm90/";
  std::ifstream file(ATTNPACK_KERNELS + folder + name);
  std::string line, before;
  for (int n = std::atoi(site.c_str() + colon + 1); n > 0 && std::getline(file, line); --n)
    if (n > 1) before = line;
  return before + "\n" + line;
}

const Equivalent* equivalent_of(const std::string& site) {
  const std::string source = source_of(site);
  for (const Equivalent& each : kEquivalent)
    if (site.rfind(each.file, 0) == 0 && source.find(each.text) != std::string::npos) return &each;
  return nullptr;
}

// Whether a run finds a race, or stops, in a process of its own.
bool notices(const std::function<void()>& run, const std::string& left_out) {
  RaceFiber::destroy_all();
  const pid_t child = fork();
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stderr)) _exit(4);
    Sites::all().left_out = left_out;
    stops_at_a_report = true;
    run();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int run_mutants(const std::string& part) {
  std::map<std::string, std::vector<std::string>> reached;  // by site: the runs that reach it
  for (const auto& [name, run] : kRuns) {
    Sites::all().reached.clear();
    run();
    for (const std::string& site : Sites::all().reached)
      if (site.find(part) != std::string::npos) reached[site].push_back(name);
  }
  int survivors = 0;
  for (const auto& [site, names] : reached) {
    const auto killer = std::find_if(names.begin(), names.end(),
                                     [&](const std::string& name) { return notices(kRuns.at(name), site); });
    const Equivalent* listed = equivalent_of(site);
    if (killer != names.end())
      std::printf("%-28s race in: %s%s\n", site.c_str(), killer->c_str(), listed ? ", BUT LISTED AS EQUIVALENT" : "");
    else
      std::printf("%-28s %s\n%s\n", site.c_str(), listed ? listed->why : "NO RACE", source_of(site).c_str());
    survivors += (killer == names.end()) != (listed != nullptr);
    std::fflush(stdout);
  }
  std::printf("%zu barriers and waits, %d not as listed\n", reached.size(), survivors);
  return survivors > 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  Sites::all().records = true;
  if (mode == "mutants") return run_mutants(argc > 2 ? argv[2] : "");
  if (mode == "without" && argc > 2) Sites::all().left_out = argv[2];
  const bool shared = mode == "share" && argc > 3;
  const int share = shared ? std::atoi(argv[2]) : 0, shares = shared ? std::atoi(argv[3]) : 1;
  const auto is_ours = [&](const std::string& name) {
    return std::distance(kRuns.begin(), kRuns.find(name)) % shares == share;
  };
  for (const auto& [name, run] : kRuns) {
    if (!is_ours(name)) continue;
    const int before = reports;
    run();
    std::printf("%-28s %d races\n", name.c_str(), reports - before);
    std::fflush(stdout);
  }
  if (mode == "without") return 0;
  for (const auto& [file, source, run] : kDetected) {
    if (!is_ours(run)) continue;
    const auto found = std::find_if(Sites::all().reached.begin(), Sites::all().reached.end(), [&](const auto& site) {
      return site.rfind(file, 0) == 0 && source_of(site).find(source) != std::string::npos;
    });
    const bool noticed = found != Sites::all().reached.end() && notices(kRuns.at(run), *found);
    std::printf("without %s: %s\n", source, noticed ? "a race" : "NO RACE");
    if (!noticed) return 1;
  }
  return reports > 0 ? 5 : 0;
}
