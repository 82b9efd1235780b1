// Which plain calls torch's kernels run on CUDA. The ops for CUDA tensors and F.scaled_dot_product_attention are called
// on CPU tensors, with a table whose kernels only count, and with kernels of torch that the formula computes.
#include <ATen/Context.h>
#include <torch/torch.h>

#include <cstdlib>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>
#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/detail/torch_kernels.h>

using namespace attnpack;

namespace {

int capability = 80;
int64_t ours = 0, of_torch = 0;
bool refuses = false;

constexpr CudaKernels kCounting{
    [](int) { return true; },
    [](const AttentionParams&, int64_t, int) { return cuda::ForwardPlan{}; },
    [](const AttentionParams&, const cuda::ForwardPlan&, void*, int, void*) -> const char* { return ++ours, nullptr; },
    [](const AttentionParams&, int64_t, int) { return false; },
    [](const AttentionBackwardParams&, int64_t, int) { return cuda::BackwardPlan{}; },
    [](const AttentionBackwardParams&, const cuda::BackwardPlan&, void*, int, void*) -> const char* {
      return ++ours, nullptr;
    },
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    [](int) { return capability; }};

AttentionArguments causal_if(bool causal) {
  AttentionArguments args;
  args.causal = causal;
  return args;
}

// Torch's kernels return results in layouts of their own: here [batch, length, heads, width].
std::tuple<Tensor, Tensor> forward_of_torch(const Tensor& query, const Tensor& key, const Tensor& value, bool causal,
                                            std::optional<double> scale) {
  TORCH_CHECK(!refuses, "not built");
  ++of_torch;
  AttentionArguments args = causal_if(causal);
  args.scale = scale;
  const auto [out, lse] = attention_formula(query, key, value, args);
  return {out.transpose(1, 2).contiguous().transpose(1, 2), lse};
}
using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
Forward flash(const Tensor& query, const Tensor& key, const Tensor& value, double, bool causal, bool,
              std::optional<double> scale) {
  const auto [out, lse] = forward_of_torch(query, key, value, causal, scale);
  return {out, lse, Tensor(), Tensor(), query.size(2), key.size(2), Tensor(), Tensor(), Tensor()};
}
Forward cudnn(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>&, bool, double,
              bool causal, bool, std::optional<double> scale) {
  const auto [out, lse] = forward_of_torch(query, key, value, causal, scale);
  return {out, lse.unsqueeze(-1), Tensor(), Tensor(), query.size(2), key.size(2), Tensor(), Tensor(), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> backward_of_torch(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const Tensor& lse, bool causal,
                                                     std::optional<double> scale) {
  TORCH_CHECK(!refuses, "not built");
  ++of_torch;
  CHECK(lse.sizes() == query.sizes().slice(0, 3));
  AttentionArguments args = causal_if(causal);
  args.scale = scale;
  const auto [q, k, v, m, s] =
      attention_backward_formula(grad_out, std::nullopt, query, key, value, args, false, false);
  return {q.transpose(1, 2).contiguous().transpose(1, 2), k, v};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor&, const Tensor& lse, const Tensor&,
                                                  const Tensor&, c10::SymInt, c10::SymInt, double, bool causal,
                                                  const Tensor&, const Tensor&, std::optional<double> scale) {
  return backward_of_torch(grad_out, query, key, value, lse, causal, scale);
}
std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor&, const Tensor& lse, const Tensor&,
                                                  const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                  c10::SymInt, c10::SymInt, double, bool causal,
                                                  std::optional<double> scale) {
  return backward_of_torch(grad_out, query, key, value, lse.squeeze(-1), causal, scale);
}

// The counting table and torch's kernels on the CPU, for as long as it lives.
class Machine {
 public:
  explicit Machine(int of_device) {
    capability = of_device;
    refuses = false;
    ours = of_torch = 0;
    reset_torch_kernel_report();
    set_cuda_kernels(&kCounting);
    torch_.impl("_scaled_dot_product_flash_attention", flash);
    torch_.impl("_scaled_dot_product_cudnn_attention", cudnn);
    torch_.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
    torch_.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward);
  }
  ~Machine() {
    set_cuda_kernels(nullptr);
    unsetenv("ATTNPACK_CUDA");
    at::globalContext().setDeterministicAlgorithms(false, false);
  }

 private:
  torch::Library torch_{torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__};
};

struct Tensors {
  Tensor query, key, value, grad_out;
  explicit Tensors(at::ScalarType dtype = at::kBFloat16, int64_t q_len = 20, int64_t dim = 64, int64_t v_dim = 64)
      : query(at::randn({2, 4, q_len, dim}).to(dtype)),
        key(at::randn({2, 2, 20, dim}).to(dtype)),
        value(at::randn({2, 2, 20, v_dim}).to(dtype)),
        grad_out(at::randn({2, 4, q_len, v_dim}).to(dtype)) {}
};
AttentionResult attend_here(const Tensors& x, const AttentionArguments& args = {}) {
  return attention_cuda(x.query, x.key, x.value, args);
}
void differentiate_here(const Tensors& x, const AttentionArguments& args = {},
                        const std::optional<Tensor>& grad_lse = {}) {
  const auto [out, lse] = attention_formula(x.query, x.key, x.value, args);
  attention_backward_cuda(x.grad_out, grad_lse, x.query, x.key, x.value, out, lse, args, false, false);
}
// How many of torch's kernels a call runs; ours run the others.
template <class Call>
int64_t count_of_torch(const Call& call) {
  ours = of_torch = 0;
  call();
  CHECK(ours + of_torch == 1);
  return of_torch;
}

}  // namespace

TEST_CASE("the operator runs torch's kernels where no kernel of ours is of the device's class") {
  torch::manual_seed(1);
  const at::NoGradGuard no_grad;
  for (const auto& [device, torch_runs] :
       {std::pair{80, 1}, {86, 1}, {89, 1}, {100, 1}, {103, 1}, {120, 1}, {90, 0}, {75, 0}, {87, 0}, {130, 0}})
    for (const bool causal : {false, true}) {
      CAPTURE(device, causal);
      const Machine machine(device);
      const Tensors x;
      CHECK(count_of_torch([&] { attend_here(x, causal_if(causal)); }) == torch_runs);
      CHECK(count_of_torch([&] { differentiate_here(x, causal_if(causal)); }) == torch_runs);
    }
}

TEST_CASE("torch's kernels give our results, in our layout, and are counted by name") {
  torch::manual_seed(2);
  const at::NoGradGuard no_grad;
  for (const int device : {80, 100}) {
    const Machine machine(device);
    Tensors x;
    for (const bool transposed : {false, true}) {
      if (transposed) x.query = x.query.transpose(1, 2).contiguous().transpose(1, 2);
      AttentionArguments args = causal_if(true);
      args.scale = 0.3;
      const auto [wanted, wanted_lse] = attention_op(x.query, x.key, x.value, args);
      const auto [out, lse] = attend_here(x, args);
      CHECK(at::allclose(out, wanted, 0.03, 0.03));
      CHECK(at::allclose(lse, wanted_lse, 1e-4, 1e-4));
      CHECK(lse.sizes() == wanted_lse.sizes());
      CHECK(out.strides() == wanted.strides());
      const auto there =
          attention_backward_op(x.grad_out, {}, x.query, x.key, x.value, wanted, wanted_lse, args, false, false);
      const auto here =
          attention_backward_cuda(x.grad_out, {}, x.query, x.key, x.value, wanted, wanted_lse, args, false, false);
      CHECK(at::allclose(std::get<0>(here), std::get<0>(there), 0.1, 0.1));
      CHECK(at::allclose(std::get<1>(here), std::get<1>(there), 0.1, 0.1));
      CHECK(at::allclose(std::get<2>(here), std::get<2>(there), 0.1, 0.1));
      CHECK(std::get<0>(here).strides() == std::get<0>(there).strides());
    }
    CHECK(ours == 0);
    const std::string name = device == 80 ? "flash" : "cudnn";
    const auto report = torch_kernel_report();
    REQUIRE(report.size() == 2);
    CHECK((report[0] == std::pair<std::string, int64_t>{name + ", forward", 2}));
    CHECK((report[1] == std::pair<std::string, int64_t>{name + ", backward", 2}));
  }
}

TEST_CASE("calls with rules, of other types and of few rows run on our kernels") {
  torch::manual_seed(3);
  const at::NoGradGuard no_grad;
  const Machine machine(80);
  const Tensors x;
  const auto with = [](const auto& change) {
    AttentionArguments args;
    change(args);
    return args;
  };
  const Tensor lens = at::tensor({20, 11}, at::kLong);
  for (const AttentionArguments& args : std::vector<AttentionArguments>{
           with([](auto& a) { a.mask = at::ones({20, 20}, at::kBool); }), with([](auto& a) { a.window = {4, -1}; }),
           with([](auto& a) { a.softcap = 3; }), with([](auto& a) { a.sinks = at::zeros({4}); }),
           with([](auto& a) { a.alibi_slopes = at::ones({4}); }), with([&](auto& a) { a.kv_lens = lens; }),
           with([](auto& a) { a.causal = true, a.q_offset = 1; }),
           with([&](auto& a) { a.causal = true, a.q_offsets = lens; }),
           with([](auto& a) { a.head_map = std::vector<int64_t>{0, 1, 1, 0}; })}) {
    CHECK(count_of_torch([&] { attend_here(x, args); }) == 0);
    CHECK(count_of_torch([&] { differentiate_here(x, args); }) == 0);
  }
  CHECK(count_of_torch([&] { differentiate_here(x, {}, at::ones({2, 4, 20})); }) == 0);  // with a gradient of lse
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kFloat)); }) == 0);
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kHalf)); }) == 1);
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kBFloat16, 20, 264, 264)); }) == 0);
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kBFloat16, 20, 60, 60)); }) == 0);
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kBFloat16, 20, 64, 32)); }) == 0);
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kBFloat16, 8)); }) == 0);  // 16 rows of a kv head: decoding
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kBFloat16, 9)); }) == 1);
  CHECK(count_of_torch([&] { attend_here(Tensors(at::kBFloat16, 9), causal_if(true)); }) == 0);  // not square
  CHECK(count_of_torch([&] { differentiate_here(Tensors(at::kBFloat16, 8)); }) == 1);
}

TEST_CASE("wide heads run flash where cuDNN has no kernel for them") {
  const at::NoGradGuard no_grad;
  const Machine machine(100);
  attend_here(Tensors(at::kBFloat16, 20, 128, 128));
  attend_here(Tensors(at::kBFloat16, 20, 192, 192));
  CHECK(torch_kernel_report() ==
        std::vector<std::pair<std::string, int64_t>>{{"flash, forward", 1}, {"cudnn, forward", 1}});
}

TEST_CASE("ATTNPACK_CUDA=own, deterministic algorithms and a refusal bring our kernels back") {
  const at::NoGradGuard no_grad;
  const Machine machine(80);
  const Tensors x;
  const auto is_ours = [&] {
    return count_of_torch([&] { attend_here(x); }) == 0 && count_of_torch([&] { differentiate_here(x); }) == 0;
  };
  CHECK(!is_ours());
  CHECK(describe_cuda_choice().rfind("fastest: torch's kernels for plain 16-bit calls on compute capability 8.0, 8.6, "
                                     "8.9, 10.0, 10.3, 12.0, else",
                                     0) == 0);
  setenv("ATTNPACK_CUDA", "own", 1);
  CHECK(is_ours());
  CHECK(describe_cuda_choice() == "own: attnpack's kernels, by ATTNPACK_CUDA");
  setenv("ATTNPACK_CUDA", "fastest", 1);
  CHECK(!is_ours());
  at::globalContext().setDeterministicAlgorithms(true, false);
  CHECK(is_ours());
  CHECK(describe_cuda_choice() == "own: attnpack's kernels, by torch.use_deterministic_algorithms");
  at::globalContext().setDeterministicAlgorithms(false, false);
  setenv("ATTNPACK_CUDA", "fast", 1);
  CHECK(complains("ATTNPACK_CUDA is 'fast', wants own or fastest", [&] { attend_here(x); }));
  setenv("ATTNPACK_CUDA", "fastest", 1);
  refuses = true;
  reset_torch_kernel_report();
  CHECK(is_ours());
  CHECK(torch_kernel_report() ==
        std::vector<std::pair<std::string, int64_t>>{{"refused by torch's kernel, so ours ran", 2}});
}

TEST_CASE("F.scaled_dot_product_attention passes plain calls on where torch's kernel is faster") {
  const Replacement replacement = enable_sdpa();
  const ReplacementGuard guard(replacement);
  const auto passes_on = [](const Tensors& x, bool gradients, const std::optional<Tensor>& mask = {}) {
    reset_sdpa_report();
    at::scaled_dot_product_attention(x.query.detach().requires_grad_(gradients), x.key, x.value, mask, 0., false,
                                     std::nullopt, true);
    const auto report = sdpa_report();
    if (report.passed_on.empty()) return false;
    CHECK(report.passed_on[0].first == "torch's own kernel is faster on the device");
    return true;
  };
  CHECK(!passes_on(Tensors(), false));  // on the CPU
  for (const int device : {80, 86, 89, 90, 100, 103, 120}) {
    const Machine machine(device);
    CHECK(passes_on(Tensors(), false));
    CHECK(passes_on(Tensors(), true));
    CHECK(passes_on(Tensors(at::kBFloat16, 2), true));
    CHECK(!passes_on(Tensors(at::kBFloat16, 2), false));  // decoding
    CHECK(!passes_on(Tensors(at::kFloat), true));
    CHECK(!passes_on(Tensors(), true, at::ones({20, 20}, at::kBool)));
    setenv("ATTNPACK_CUDA", "own", 1);
    CHECK(!passes_on(Tensors(), true));
    unsetenv("ATTNPACK_CUDA");
  }
  const Machine machine(75);
  CHECK(!passes_on(Tensors(), true));
}
