// The ops for CUDA tensors, called on CPU tensors with emulated kernels: what they hand to the kernels, how often they
// launch one, and that results are those of the CPU's ops.
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <set>

#include "catch.h"
#include "emulated_kernels.h"

#include <attnpack/attnpack.h>
#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/run_attention.h>
#include <attnpack/ops/detail/attention_quantized.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/kv_cache_paged.h>
#include <attnpack/ops/quantize.h>

using namespace attnpack;

namespace {

AttentionArguments causal_from(int64_t q_offset) {
  AttentionArguments args;
  args.causal = true;
  args.q_offset = q_offset;
  return args;
}

// The CUDA ops in place of the CPU's, for as long as it lives.
class CudaOpsOnCpu {
 public:
  CudaOpsOnCpu() {
    library_.impl("attention", from_schema<attention_cuda>);
    library_.impl("attention_varlen", from_schema<attention_varlen_cuda>);
    library_.impl("attention_varlen_backward", from_schema<attention_varlen_backward_cuda>);
    library_.impl("attention_quantized", from_schema<attention_quantized_cuda>);
    library_.impl("kv_cache_append_", kv_cache_append_cuda);
    library_.impl("kv_cache_append_rotated_", kv_cache_append_rotated_cuda);
    library_.impl("kv_cache_append_paged_", kv_cache_append_paged_cuda);
    library_.impl("quantize_rows", quantize_rows_cuda);
    library_.impl("dequantize_rows", dequantize_rows_cuda);
  }

 private:
  cuda::EmulatedKernels kernels_;
  torch::Library library_{torch::Library::IMPL, "attnpack", c10::DispatchKey::CPU, __FILE__, __LINE__};
};

// Ops of torch that start a kernel on a CUDA tensor: all but those that make views, reserve memory or call others.
std::vector<std::string>& torch_launches() {
  static std::vector<std::string> names;
  return names;
}
std::unique_ptr<at::ObserverContext> record(const at::RecordFunction& f) {
  static const std::set<std::string> kFree{
      "view",         "as_strided",    "transpose",  "permute",   "expand",      "slice",     "select",
      "narrow",       "squeeze",       "unsqueeze",  "reshape",   "flatten",     "unflatten", "empty",
      "empty_like",   "empty_strided", "detach",     "detach_",   "alias",       "to",        "_to_copy",
      "clone",        "contiguous",    "lift_fresh", "t",         "result_type", "unbind",    "_reshape_alias",
      "_unsafe_view", "is_nonzero",    "numpy_T",    "expand_as", "set_",        "resize_",   "view_as",
      "sym_size",     "detach_copy"};
  const std::string name = f.name();
  if (name.rfind("aten::", 0) == 0 && !kFree.count(name.substr(6))) torch_launches().push_back(name);
  return nullptr;
}

std::string names_of_launches() {
  std::string names;
  for (const auto& name : torch_launches()) names += name + " ";
  return names + "and " + std::to_string(cuda::launches()) + " of ours";
}

template <class Call>
int64_t count_launches(const Call& call) {
  cuda::launches() = 0;
  torch_launches().clear();
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(record).scopes({at::RecordScope::FUNCTION}));
  call();
  at::removeCallback(handle);
  return cuda::launches() + static_cast<int64_t>(torch_launches().size());
}

Tensor draw(at::IntArrayRef shape, at::ScalarType dtype = at::kBFloat16) { return at::randn(shape).to(dtype); }

bool near(const Tensor& a, const Tensor& b, double unit) {
  return at::allclose(a.to(at::kDouble), b.to(at::kDouble), unit, unit);
}

struct Cache {
  Tensor key, value, lengths;
  Cache(int64_t batch, int64_t capacity, at::ScalarType dtype, int64_t held)
      : key(draw({batch, 2, capacity, 64}, dtype)),
        value(draw({batch, 2, capacity, 64}, dtype)),
        lengths(at::full({batch}, held, at::kLong)) {}
  Cache copy() const {
    Cache r = *this;
    r.key = key.clone();
    r.value = value.clone();
    r.lengths = lengths.clone();
    return r;
  }
  bool operator==(const Cache& other) const {
    return key.equal(other.key) && value.equal(other.value) && lengths.equal(other.lengths);
  }
};

AttendOptions layer_options(const Cache& cache) {
  AttendOptions options;
  options.causal = true;
  options.rope = RopeSettings{};
  options.rope->inv_freq = std::vector<double>(32, 0.1);
  options.cache = CacheTensors{cache.key, cache.value, cache.lengths};
  return options;
}

}  // namespace

TEST_CASE("an eager decode step of a layer launches at most six kernels") {
  torch::manual_seed(0);
  const at::NoGradGuard no_grad;
  Cache cache(2, 700, at::kBFloat16, 600), wanted_cache = cache.copy();
  const Tensor query = draw({2, 8, 1, 64}), key = draw({2, 2, 1, 64}), value = draw({2, 2, 1, 64});
  const Tensor wanted = attend(query, key, value, layer_options(wanted_cache));
  const CudaOpsOnCpu here;
  attend(query, key, value, layer_options(cache.copy()));  // frequencies are put on the device once
  Tensor got;
  const int64_t count = count_launches([&] { got = attend(query, key, value, layer_options(cache)); });
  CAPTURE(names_of_launches());
  CHECK(count <= 6);
  CHECK(count >= 4);  // the append and its lengths, attention, the join of its parts
  CHECK(near(got, wanted, 0.02));
  CHECK(cache == wanted_cache);
}

TEST_CASE("attention and its gradients are the CPU's") {
  torch::manual_seed(6);
  const at::NoGradGuard no_grad;
  const cuda::EmulatedKernels kernels;
  const Tensor sinks = at::randn({4}), mask = at::randn({4, 20, 70}), lens = at::tensor({70, 44}, at::kLong),
               offsets = at::tensor({50, 24}, at::kInt);
  const std::vector<int64_t> head_map{0, 1, 1, 0};
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const bool all : {false, true}) {
      const Tensor query = draw({2, 20, 4, 64}, dtype).transpose(1, 2), key = draw({2, 2, 70, 64}, dtype),
                   value = draw({2, 2, 70, 40}, dtype), grad_out = draw({2, 4, 20, 40}, dtype);
      AttentionArguments args = causal_from(50);
      if (all) {
        args.mask = mask;
        args.q_offsets = offsets;
        args.kv_lens = lens;
        args.sinks = sinks;
        args.head_map = head_map;
        args.dropout_p = 0.2;
        args.dropout_seed = at::tensor({77}, at::kLong);
      }
      const auto [wanted, wanted_lse] = attention_op(query, key, value, args);
      const auto [out, lse] = attention_cuda(query, key, value, args);
      const double unit = dtype == at::kFloat ? 1e-4 : 0.03;
      CHECK(near(out, wanted, unit));
      CHECK(near(lse, wanted_lse, 1e-4));
      CHECK(out.strides() == wanted.strides());
      const auto gradients = [&](const auto& backward) {
        const auto [q, k, v, m, s] =
            backward(grad_out, std::nullopt, query, key, value, wanted, wanted_lse, args, all, all);
        return std::vector<Tensor>{q, k, v, m, s};
      };
      const auto there = gradients(attention_backward_op), here = gradients(attention_backward_cuda);
      for (size_t i = 0; i < there.size(); ++i) {
        CAPTURE(i, all, dtype);
        CHECK(near(here[i], there[i], 4 * unit));
      }
    }
}

// No kernel starts without blocks, and no map of a tensor has a size of 0: the emulator stops at one, as the driver
// does.
TEST_CASE("empty tensors give what they give on the CPU, on every device") {
  const at::NoGradGuard no_grad;
  constexpr int64_t kFull[] = {2, 4, 2, 50, 130, 64, 64};  // batch, heads, kv heads, q_len, kv_len, dims
  for (const cuda::Device& device :
       {cuda::Device{8, 227 * 1024}, cuda::Device{8, 99 * 1024}, cuda::Device{1, 227 * 1024, true}})
    for (const std::vector<int>& empty : std::vector<std::vector<int>>{{0}, {1}, {1, 2}, {3}, {4}, {3, 4}, {5}, {6}})
      for (const bool few : {false, true}) {
        CAPTURE(device.sm90, device.shared_bytes, empty, few);
        const cuda::EmulatedKernels kernels(device);
        std::vector<int64_t> n(kFull, kFull + 7);
        if (few) n[3] = 3;
        for (const int i : empty) n[i] = 0;
        const Tensor query = draw({n[0], n[1], n[3], n[5]}), key = draw({n[0], n[2], n[4], n[5]}),
                     value = draw({n[0], n[2], n[4], n[6]}), grad_out = draw({n[0], n[1], n[3], n[6]});
        AttentionArguments args = causal_from(80);
        args.scale = 0.5;
        args.sinks = at::ones({n[1]});
        const auto [wanted, wanted_lse] = attention_op(query, key, value, args);
        const auto [out, lse] = attention_cuda(query, key, value, args);
        CHECK(out.sizes() == wanted.sizes());
        CHECK(near(out, wanted, 0.03));
        CHECK(near(lse, wanted_lse, 1e-4));
        const auto gradients = [&](const auto& backward) {
          const auto [q, k, v, m, s] =
              backward(grad_out, std::nullopt, query, key, value, wanted, wanted_lse, args, false, true);
          return std::vector<Tensor>{q, k, v, s};
        };
        const auto there = gradients(attention_backward_op), here = gradients(attention_backward_cuda);
        for (size_t i = 0; i < there.size(); ++i) {
          CHECK(here[i].sizes() == there[i].sizes());
          CHECK(near(here[i], there[i], 0.12));
        }
      }
}

TEST_CASE("calls whose steps would not be counted in 32 bits run without kernels") {
  const Tensor query = at::empty({1}).expand({1, 2, 3, 64});
  constexpr int64_t kEnd = int64_t{1} << 31, kStep = cuda::kMostKeysOfStep;
  CHECK(countable(query, kEnd - 2 * kStep - 1));
  CHECK(!countable(query, kEnd - kStep));  // rounded up to a step it would be 2^31
  CHECK(!countable(at::empty({1}).expand({1, 2, kEnd - kStep, 64}), 5));
  CHECK(!countable(at::empty({1}).expand({1, kEnd - kStep, 3, 64}), 5));
}

TEST_CASE("named keys and their gradients are the CPU's") {
  torch::manual_seed(7);
  const at::NoGradGuard no_grad;
  const cuda::EmulatedKernels kernels;
  const std::vector<int64_t> head_map{0, 1, 1, 0};
  for (const int64_t block : {1, 5})
    for (const int64_t index_heads : {1, 2})
      for (const bool all : {false, true}) {
        const Tensor query = draw({2, 3, 4, 64}, at::kFloat).transpose(1, 2),
                     grad_out = draw({2, 4, 3, 40}, at::kFloat);
        // Keys of a cache with room for more, values as a projection gives them.
        const Tensor key = draw({2, 2, 50, 64}, at::kFloat).narrow(2, 0, 43),
                     value = draw({2, 43, 2, 40}, at::kFloat).transpose(1, 2);
        AttentionArguments args = causal_from(30);
        const int64_t blocks = count_blocks(43, block);
        args.key_index = at::randint(-1, blocks, {2, index_heads, 3, 12}, at::kInt);
        args.key_index->select(2, 1).fill_(-1);
        args.key_block = block;
        if (all) {
          args.mask = at::randn({4, 1, 43}).masked_fill(at::rand({4, 1, 43}) < 0.2, -INFINITY);
          args.window[0] = 25;
          args.kv_lens = at::tensor({43, 20}, at::kLong);
          args.sinks = at::randn({4});
          args.alibi_slopes = at::rand({4});
          args.head_map = head_map;
          args.softcap = 2;
        }
        CAPTURE(block, index_heads, all);
        const auto [wanted, wanted_lse] = attention_op(query, key, value, args);
        const auto [out, lse] = attention_cuda(query, key, value, args);
        CHECK(near(out, wanted, 1e-4));
        CHECK(near(lse, wanted_lse, 1e-4));
        CHECK(out.strides() == wanted.strides());
        const auto gradients = [&](const auto& backward) {
          const auto [q, k, v, m, s] = backward(grad_out, std::optional(at::ones_like(lse)), query, key, value, wanted,
                                                wanted_lse, args, all, all);
          return std::vector<Tensor>{q, k, v, m, s};
        };
        const auto there = gradients(attention_backward_op), here = gradients(attention_backward_cuda);
        for (size_t i = 0; i < there.size(); ++i) {
          CAPTURE(i);
          CHECK(near(here[i], there[i], 4e-4));
        }
      }
}

TEST_CASE("rotating and plain appends are the CPU's, bit by bit") {
  torch::manual_seed(1);
  const at::NoGradGuard no_grad;
  const cuda::EmulatedKernels kernels;
  const std::vector<double> inv_freq{1.0, 0.1, 0.01};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const bool lens : {false, true})
      for (const bool transposed : {false, true}) {
        const Cache first(3, 9, dtype, 3);
        const auto rows = [&](int64_t heads) {  // [3, heads, 4, 64]
          return transposed ? draw({3, 4, heads, 64}, dtype).transpose(1, 2) : draw({3, heads, 4, 64}, dtype);
        };
        const Tensor query = rows(5), key = rows(2), value = rows(2);
        std::optional<Tensor> new_lens;
        if (lens) new_lens = at::tensor({4, 0, 3}, at::kInt);
        Cache one = first.copy(), other = first.copy();
        kv_cache_append_(one.key, one.value, one.lengths, key, value, new_lens);
        kv_cache_append_cuda(other.key, other.value, other.lengths, key, value, new_lens, std::nullopt, std::nullopt);
        CHECK(one == other);
        CHECK(!(one == first));
        for (const bool interleaved : {false, true}) {
          Cache here = first.copy(), there = first.copy();
          const Tensor rotated = kv_cache_append_rotated_(here.key, here.value, here.lengths, query, key, value,
                                                          inv_freq, 1.5, interleaved, new_lens);
          CHECK(rotated.equal(kv_cache_append_rotated_cuda(there.key, there.value, there.lengths, query, key, value,
                                                           inv_freq, 1.5, interleaved, new_lens, std::nullopt,
                                                           std::nullopt)));
          CHECK(here == there);
        }
      }
}

TEST_CASE("an append drops what goes beyond the capacity, and goes to the slots of a window") {
  torch::manual_seed(2);
  const cuda::EmulatedKernels kernels;
  Cache cache(2, 9, at::kFloat, 5), composed = cache.copy();
  const Tensor key = draw({2, 2, 6, 64}, at::kFloat), value = draw({2, 2, 6, 64}, at::kFloat);
  kv_cache_append_cuda(cache.key, cache.value, cache.lengths, key, value, std::nullopt, std::nullopt, std::nullopt);
  kv_cache_append_composed(composed.key, composed.value, composed.lengths, key, value, std::nullopt);
  CHECK(cache == composed);
  CHECK(cache.lengths.equal(at::tensor({9, 9}, at::kLong)));
  Cache window(2, 9, at::kFloat, 512 + 3), slots = window.copy();
  const Tensor dropped = at::full({2}, 512, at::kLong), fresh = key.narrow(2, 0, 2);
  kv_cache_append_cuda(window.key, window.value, window.lengths, fresh, fresh, std::nullopt, std::nullopt, dropped);
  kv_cache_append_composed(slots.key, slots.value, slots.lengths, fresh, fresh, std::nullopt, dropped);
  CHECK(window == slots);
  CHECK(window.key.narrow(2, 3, 2).equal(fresh));
}

TEST_CASE("pages are written and read as on the CPU, without waiting") {
  torch::manual_seed(3);
  const at::NoGradGuard no_grad;
  struct Pages {
    int64_t page_size, held, length;
  };
  for (const auto& [page_size, held, length] : {Pages{16, 40, 2}, {5, 301, 1}}) {
    const int64_t pages = 2 * (held / page_size + 2), max_pages = pages / 2;
    const Tensor table = at::randperm(pages, at::kInt).view({2, max_pages});
    // A pool whose rows are not contiguous.
    const Tensor key_pool = draw({pages, 2, page_size, 64}).transpose(1, 2),
                 value_pool = draw({pages, page_size, 2, 64});
    const Tensor lengths = at::tensor({held, held - 7}, at::kLong);
    const Tensor query = draw({2, 6, length, 64}), key = draw({2, 2, length, 64}), value = draw({2, 2, length, 64});
    const auto run = [&](const Tensor& keys, const Tensor& values, const Tensor& lens) {
      AttendOptions options;
      options.causal = true;
      options.cache = CacheTensors{keys, values, lens};
      options.cache->block_table = table;
      return attend(query, key, value, options);
    };
    // The composition's bits are those of another kernel on gathered keys: the CPU's op is the reference.
    Tensor keys = key_pool.clone(), values = value_pool.clone(), lens = lengths.clone();
    const Tensor wanted = run(keys, values, lens);
    const CudaOpsOnCpu here;
    Tensor keys2 = key_pool.clone(), values2 = value_pool.clone(), lens2 = lengths.clone();
    Tensor got;
    const int64_t count = count_launches([&] { got = run(keys2, values2, lens2); });
    CHECK(near(got, wanted, 0.02));
    CHECK(keys.equal(keys2));
    CHECK(values.equal(values2));
    CHECK(lens.equal(lens2));
    CAPTURE(names_of_launches());
    // The ends of the sequences are numbers on the CPU on every device, and offsets of another device are not clamped.
    int64_t on_cpu = 0;
    for (const char* name : {"aten::arange", "aten::mul", "aten::clamp"})
      on_cpu += std::count(torch_launches().begin(), torch_launches().end(), name);
    if (length == 1) CHECK(count - on_cpu <= 6);
    // No bit depends on where the pages lie.
    const Tensor order = at::randperm(pages, at::kLong), inverse = order.argsort();
    const Tensor moved_table = inverse.index({table.to(at::kLong)}).to(at::kInt);
    VarlenArguments args;
    args.max_seqlen_q = length;
    args.block_table = table;
    args.kv_lens = lens;
    args.causal = true;
    const Tensor rows = query.transpose(1, 2).flatten(0, 1),
                 ends = at::tensor({int64_t{0}, length, 2 * length}, at::kLong);
    const Tensor out = std::get<0>(attention_varlen_cuda(rows, keys, values, ends, args));
    args.block_table = moved_table;
    const auto moved = [&](const Tensor& pool) { return pool.index_select(0, order); };
    CHECK(out.equal(std::get<0>(attention_varlen_cuda(rows, moved(keys), moved(values), ends, args))));
    CHECK(near(out.view({2, length, 6, 64}).flatten(2), wanted, 0.02));
  }
}

namespace {

// Sequences without queries or keys, and such that begin in the middle of tiles.
struct Packed {
  Tensor query_ends = at::tensor({0, 20, 20, 23, 90}, at::kLong),
         key_ends = at::tensor({0, 50, 60, 60, 141}, at::kLong);
  Tensor query, key, value;
  explicit Packed(at::ScalarType dtype)
      : query(draw({90, 4, 64}, dtype)), key(draw({141, 2, 64}, dtype)), value(draw({141, 2, 40}, dtype)) {}
};
VarlenArguments packed_rules(const Packed& x, bool all) {
  VarlenArguments args;
  args.cu_seqlens_k = x.key_ends;
  args.causal = true;
  if (!all) return args;
  args.window[0] = 30;
  args.softcap = 2;
  args.sinks = at::randn({4});
  args.alibi_slopes = at::rand({4});
  args.head_map = HeadMap(std::vector<int64_t>{0, 1, 1, 0});
  args.q_offsets = at::tensor({5, 0, 40, 14}, at::kInt);
  return args;
}

}  // namespace

TEST_CASE("packed sequences and their gradients are one call of the kernels, which gives the CPU's results") {
  torch::manual_seed(8);
  const at::NoGradGuard no_grad;
  for (const cuda::Device& device : {cuda::Device{1, 227 * 1024}, cuda::Device{1, 227 * 1024, true}})
    for (const auto dtype : {at::kFloat, at::kBFloat16})
      for (const bool all : {false, true}) {
        CAPTURE(device.sm90, dtype, all);
        const cuda::EmulatedKernels kernels(device);
        const Packed x(dtype);
        VarlenArguments args = packed_rules(x, all);
        const auto [wanted, wanted_lse] = attention_varlen_op(x.query, x.key, x.value, x.query_ends, args);
        const double unit = dtype == at::kFloat ? 1e-4 : 0.03;
        AttentionResult got;
        for (const int64_t hint : {0, 3, 67, 1000}) {  // none, wrong ones and the right one
          if (hint) args.max_seqlen_q = args.max_seqlen_k = hint;
          const auto call = [&] { got = attention_varlen_cuda(x.query, x.key, x.value, x.query_ends, args); };
          const int64_t count = count_launches(call);
          CAPTURE(hint, names_of_launches());
          if (!all) CHECK(count == 1);
          CHECK(cuda::launches() == 1);
          CHECK(near(std::get<0>(got), wanted, unit));
          CHECK(near(std::get<1>(got), wanted_lse, 1e-4));
          CHECK(std::get<0>(got).is_contiguous());
          CHECK(std::get<1>(got).is_contiguous());
        }
        const Tensor grad_out = draw({90, 4, 40}, dtype), grad_lse = at::randn({4, 90});
        const auto gradients = [&](const auto& backward) {
          const auto [q, k, v, s] = backward(grad_out, std::optional(grad_lse), x.query, x.key, x.value, wanted,
                                             wanted_lse, x.query_ends, args, all);
          return std::vector<Tensor>{q, k, v, s};
        };
        const auto there = gradients(attention_varlen_backward_op);
        cuda::launches() = 0;
        const auto here = gradients(attention_varlen_backward_cuda);
        CHECK(cuda::launches() == 3);
        for (size_t i = 0; i < there.size(); ++i) {
          CAPTURE(i);
          CHECK(here[i].sizes() == there[i].sizes());
          CHECK(near(here[i], there[i], 4 * unit));
        }
      }
}

TEST_CASE("ragged queries over pages are one call of the kernels") {
  torch::manual_seed(9);
  const at::NoGradGuard no_grad;
  for (const cuda::Device& device : {cuda::Device{1, 227 * 1024}, cuda::Device{1, 227 * 1024, true}})
    for (const bool all : {false, true}) {
      CAPTURE(device.sm90, all);
      const cuda::EmulatedKernels kernels(device);
      const Packed x(at::kBFloat16);
      const Tensor key_pool = draw({30, 7, 2, 64}), value_pool = draw({30, 7, 2, 40}),
                   table = at::randperm(30, at::kInt).narrow(0, 0, 28).view({4, 7}).repeat({1, 2});
      VarlenArguments args = packed_rules(x, all);
      args.cu_seqlens_k = std::nullopt;
      args.block_table = table;
      args.kv_lens = at::tensor({50, 10, 0, 81}, at::kLong);
      const auto [wanted, wanted_lse] = attention_varlen_op(x.query, key_pool, value_pool, x.query_ends, args);
      for (const int64_t hint : {0, 67}) {
        if (hint) args.max_seqlen_q = hint;
        AttentionResult got;
        const auto call = [&] { got = attention_varlen_cuda(x.query, key_pool, value_pool, x.query_ends, args); };
        const int64_t count = count_launches(call);
        CAPTURE(hint, names_of_launches());
        if (!all) CHECK(count == 1);
        CHECK(cuda::launches() == 1);
        CHECK(near(std::get<0>(got), wanted, 0.03));
        CHECK(near(std::get<1>(got), wanted_lse, 1e-4));
      }
    }
}

TEST_CASE("packed calls that the kernels do not take are one call for each sequence") {
  torch::manual_seed(10);
  const at::NoGradGuard no_grad;
  const cuda::EmulatedKernels kernels;
  const Packed x(at::kFloat);
  VarlenArguments args = packed_rules(x, false);
  const auto check = [&](const VarlenArguments& args) {
    const Tensor wanted = std::get<0>(attention_varlen_op(x.query, x.key, x.value, x.query_ends, args));
    cuda::launches() = 0;
    CHECK(near(std::get<0>(attention_varlen_cuda(x.query, x.key, x.value, x.query_ends, args)), wanted, 1e-4));
    CHECK(cuda::launches() == 0);  // `attention` is the CPU's here
  };
  VarlenArguments dropping = args, in_chunks = args;
  dropping.dropout_p = 0.2;
  dropping.dropout_seed = at::tensor({77}, at::kLong);
  check(dropping);
  in_chunks.chunk = 16;
  check(in_chunks);
}

TEST_CASE("wrong ends of packed sequences are refused where numbers are checked") {
  const cuda::EmulatedKernels kernels;
  const Packed x(at::kFloat);
  const VarlenArguments args = packed_rules(x, false);
  const auto call = [&](std::vector<int64_t> ends) {
    attention_varlen_cuda(x.query, x.key, x.value, at::tensor(ends, at::kLong), args);
  };
  // Unchecked they are clamped, so that nothing else is read.
  for (const auto& ends : {std::vector<int64_t>{-7, 20, 500, 23, 90}, {30, 20, 10, 0, -1}}) {
    call(ends);
    setenv("ATTNPACK_CHECK", "1", 1);
    CHECK_THROWS_WITH(call(ends), Catch::Contains("cu_seqlens_q"));
    unsetenv("ATTNPACK_CHECK");
  }
}

TEST_CASE("packed rows go to their sequences' pages, and entries that name no page are passed over") {
  const cuda::EmulatedKernels kernels;
  const Tensor table = at::tensor({4, 1, 0, 3, -1, 9}, at::kInt).view({3, 2}),
               ends = at::tensor({0, 3, 3, 5}, at::kInt);
  Tensor pool = at::zeros({5, 4, 1, 2}), lengths = at::tensor({2, 1, 3}, at::kLong);
  const Tensor fresh = at::arange(1, 11, at::kFloat).view({5, 1, 2});
  Tensor other = pool.clone();
  kv_cache_append_paged_cuda(pool, other, table, lengths, fresh, fresh, std::nullopt, ends);
  CHECK(lengths.equal(at::tensor({5, 1, 5}, at::kLong)));
  Tensor wanted = at::zeros_like(pool);
  wanted[4].narrow(0, 2, 2).copy_(fresh.narrow(0, 0, 2));
  wanted[1][0].copy_(fresh[2]);
  CHECK(pool.equal(wanted));
  CHECK(other.equal(wanted));
}

TEST_CASE("quantised rows are the CPU's bytes, and decode reads them as the numbers that they are") {
  torch::manual_seed(4);
  const at::NoGradGuard no_grad;
  const cuda::EmulatedKernels kernels;
  for (const int64_t bits : {8, 4}) {
    for (const int64_t dim : {1, 32, 40, 64, 100, 576})
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        CAPTURE(bits, dim, dtype);
        Tensor x = draw({3, 5, dim}, dtype);
        x[0][0].zero_();
        const Tensor rows = quantize_rows(x, bits);
        // A product that ends in a half may round either way: the CPU fuses it with the rounding.
        const int64_t different = rows.ne(quantize_rows_cuda(x, bits)).sum().item<int64_t>();
        CHECK(different * 1000 <= rows.numel());
        CHECK(dequantize_rows(rows, bits, dim, dtype).equal(dequantize_rows_cuda(rows, bits, dim, dtype)));
        x[1][2][dim / 2] = NAN;
        x[2][1][dim - 1] = INFINITY;
        const auto broken = [&](const Tensor& bytes) { return dequantize_rows(bytes, bits, dim, dtype).isnan(); };
        CHECK(broken(quantize_rows(x, bits)).equal(broken(quantize_rows_cuda(x, bits))));
      }
    for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{64, 64}, {128, 64}, {192, 256}})
      for (const auto dtype : {at::kBFloat16, at::kHalf}) {
        const int64_t capacity = 301;
        const Tensor lens = at::tensor({300, 77}, at::kLong);
        const Tensor query = draw({2, 4, 2, dim}, dtype), key = draw({2, 2, capacity, dim}, dtype),
                     value = draw({2, 2, capacity, v_dim}, dtype);
        Tensor key_rows = quantize_rows(key, bits), value_rows = quantize_rows(value, bits);
        AttentionArguments args = causal_from(0);
        args.q_offsets = lens - 2;
        args.kv_lens = lens;
        const auto exact = [&](const Tensor& rows, int64_t width) {
          return dequantize_rows(rows, bits, width, at::kDouble);
        };
        const auto [truth, truth_lse] =
            attention_op(query.to(at::kDouble), exact(key_rows, dim), exact(value_rows, v_dim), args);
        const auto plain = [&](const Tensor& rows, int64_t width) { return dequantize_rows(rows, bits, width, dtype); };
        const Tensor expanded = std::get<0>(attention_op(query, plain(key_rows, dim), plain(value_rows, v_dim), args));
        key_rows.narrow(2, 300, 1).fill_(0xff);  // a scale of NaN, in keys that nobody sees
        value_rows.narrow(2, 300, 1).fill_(0xff);
        const int64_t before = cuda::launches();
        const auto [out, lse] = attention_quantized_cuda(query, key_rows, value_rows, bits, v_dim, args);
        CHECK(cuda::launches() - before <= 4);
        const double unit = dtype == at::kHalf ? 0x1p-10 : 0x1p-8;
        CHECK(near(out, truth, 4 * unit));
        CHECK(near(lse, truth_lse, 4 * unit));
        const auto error = [&](const Tensor& x) { return (x.to(at::kDouble) - truth).norm().item<double>(); };
        CHECK(error(out) <= 2 * error(expanded));
      }
  }
}

TEST_CASE("a quantised value that is not finite reaches only the rows that see it") {
  torch::manual_seed(5);
  const cuda::EmulatedKernels kernels;
  const Tensor query = draw({1, 1, 4, 64}), x = draw({1, 1, 70, 64});
  Tensor value = x.clone();
  value[0][0][67][3] = NAN;
  const AttentionArguments args = causal_from(66);
  const Tensor rows = quantize_rows(x, 8);
  const auto out = std::get<0>(attention_quantized_cuda(query, rows, quantize_rows(value, 8), 8, 64, args));
  const auto clean = std::get<0>(attention_quantized_cuda(query, rows, rows, 8, 64, args));
  CHECK(out[0][0][0].equal(clean[0][0][0]));
  CHECK(out[0][0].narrow(0, 1, 3).narrow(1, 0, 32).isnan().all().item<bool>());
  CHECK(out[0][0].narrow(0, 1, 3).narrow(1, 32, 32).equal(clean[0][0].narrow(0, 1, 3).narrow(1, 32, 32)));
}
