#include <attnpack/ops/detail/torch_kernels.h>

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include <attnpack/core/check.h>
#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/unknown_sizes.h>

namespace attnpack {
namespace {

enum class TorchKernel { kNone, kFlash, kCudnn };

// The table. operator_kernel: what the operator runs; kNone: ours. The first row that fits counts. Hopper's
// rows are measured (benchmarks/results/cuda_sm90.txt: our prefill has 0.80 to 0.95 of cuDNN's speed, our gradients
// 0.44 to 0.74). The other devices run our kernels for all devices. An H200 timed these too
// (benchmarks/results/cuda.txt): they have 0.77 of flash's speed in prefill, and 0.26 in prefill and gradients
// together. No other device was tried.
struct FasterKernel {
  int capability;
  int64_t most_head_dim;
  TorchKernel operator_kernel;
};
constexpr FasterKernel kFasterKernels[] = {
    {80, 256, TorchKernel::kFlash},  {86, 256, TorchKernel::kFlash},  {89, 256, TorchKernel::kFlash},
    {90, 256, TorchKernel::kNone},   {100, 128, TorchKernel::kCudnn}, {100, 256, TorchKernel::kFlash},
    {103, 128, TorchKernel::kCudnn}, {103, 256, TorchKernel::kFlash}, {120, 256, TorchKernel::kFlash},
};
// Decoding stays ours: it splits a sequence among more blocks.
constexpr int64_t kMostDecodedRows = 16;

const FasterKernel* row_of(const TorchCall& call) {
  if (!call.gradients && call.rows <= kMostDecodedRows) return nullptr;
  const auto* row = std::find_if(std::begin(kFasterKernels), std::end(kFasterKernels), [&](const FasterKernel& each) {
    return each.capability == call.capability && call.head_dim <= each.most_head_dim;
  });
  return row == std::end(kFasterKernels) ? nullptr : row;
}

enum Outcome { kFlashForward, kFlashBackward, kCudnnForward, kCudnnBackward, kRefused, kOutcomes };
constexpr const char* kOutcomeNames[kOutcomes] = {"flash, forward", "flash, backward", "cudnn, forward",
                                                  "cudnn, backward", "refused by torch's kernel, so ours ran"};
std::array<std::atomic<int64_t>, kOutcomes> outcome_counts{};

// Calls torch's kernel, which may refuse: torch may be built without it, or it may not know the sizes.
template <class Call>
auto try_kernel(Outcome ran, const Call& call) -> std::optional<decltype(call())> {
  try {
    auto result = call();
    ++outcome_counts[ran];
    return result;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    ++outcome_counts[kRefused];
    return std::nullopt;
  }
}

// Tensors that are torch's own results, in the layout of ours.
Tensor as_ours(const Tensor& like, const Tensor& x) {
  const Tensor wanted = empty_laid_as(like, x.sym_sizes(), x.options().device(at::kMeta));
  return x.strides() == wanted.strides() ? x : laid_as(like, x);
}

bool wants_own() {
  const char* named = std::getenv("ATTNPACK_CUDA");
  const std::string_view choice = named ? named : "";
  ATTNPACK_CHECK(choice.empty() || choice == "own" || choice == "fastest", "ATTNPACK_CUDA is '", choice,
                 "', wants own or fastest (the default)");
  return choice == "own";
}

}  // namespace

CudaChoice cuda_choice() {
  return wants_own() || at::globalContext().deterministicAlgorithms() ? CudaChoice::kOwn : CudaChoice::kFastest;
}

std::string describe_cuda_choice() {
  if (wants_own()) return "own: attnpack's kernels, by ATTNPACK_CUDA";
  if (cuda_choice() == CudaChoice::kOwn) return "own: attnpack's kernels, by torch.use_deterministic_algorithms";
  std::string devices;
  for (const FasterKernel& row : kFasterKernels) {
    const std::string device = text_of({row.capability / 10, ".", row.capability % 10});
    if (row.operator_kernel != TorchKernel::kNone && devices.find(device) == devices.npos)
      devices += (devices.empty() ? "" : ", ") + device;
  }
  return "fastest: torch's kernels for plain 16-bit calls on compute capability " + devices +
         ", else attnpack's; ATTNPACK_CUDA=own changes that";
}

bool sdpa_is_faster(const TorchCall& call) { return row_of(call) != nullptr; }

bool is_plain_call(const CudaKernels& kernels, const Tensor& query, const Tensor& key, const Tensor& value,
                   const AttentionArguments& args, TorchCall* call) {
  const bool half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  const bool square = !args.causal || (same_size(query.sym_size(2), key.sym_size(2)) && same_size(args.q_offset, 0));
  const bool no_rules = args.plain() && !args.mask && !args.q_offsets && !args.kv_lens && !args.key_index;
  if (!half || !square || !no_rules || query.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
  const auto is_dense = [](const Tensor& x) { return x.numel() > 0 && x.stride(3) == 1; };
  const int64_t dim = query.size(3);
  *call = {kernels.capability(query.device().index()), dim,
           query.size(1) / std::max<int64_t>(key.size(1), 1) * query.size(2), false};
  return is_dense(query) && is_dense(key) && is_dense(value) && dim == value.size(3) && dim % 8 == 0;
}

namespace {

// The kernel of torch by which the operator runs a call: only on devices for which we have no kernels of their class.
TorchKernel kernel_for(const CudaKernels& kernels, const Tensor& query, const Tensor& key, const Tensor& value,
                       const AttentionArguments& args, bool gradients) {
  TorchCall call{};
  if (!is_plain_call(kernels, query, key, value, args, &call)) return TorchKernel::kNone;
  call.gradients = gradients;
  const FasterKernel* row = row_of(call);
  const bool torchs = row && row->operator_kernel != TorchKernel::kNone && cuda_choice() == CudaChoice::kFastest;
  return torchs ? row->operator_kernel : TorchKernel::kNone;
}

}  // namespace

std::optional<AttentionResult> attend_by_torch(const CudaKernels& kernels, const Tensor& query, const Tensor& key,
                                               const Tensor& value, const AttentionArguments& args) {
  const TorchKernel kernel = kernel_for(kernels, query, key, value, args, false);
  if (kernel == TorchKernel::kNone) return std::nullopt;
  const bool flash = kernel == TorchKernel::kFlash;
  return try_kernel(flash ? kFlashForward : kCudnnForward, [&] {
    const auto ours = [&](const Tensor& out, const Tensor& lse) {
      return AttentionResult{as_ours(query, out),
                             lse.reshape({query.size(0), query.size(1), query.size(2)}).contiguous()};
    };
    if (flash) {
      const auto r = at::_scaled_dot_product_flash_attention(query, key, value, 0., args.causal, false, args.scale);
      return ours(std::get<0>(r), std::get<1>(r));
    }
    const auto r = at::_scaled_dot_product_cudnn_attention(query, key, value, std::nullopt, true, 0., args.causal,
                                                           false, args.scale);
    return ours(std::get<0>(r), std::get<1>(r));
  });
}

std::optional<AttentionGradients> differentiate_by_torch(const CudaKernels& kernels, const Tensor& grad_out,
                                                         const std::optional<Tensor>& grad_lse, const Tensor& query,
                                                         const Tensor& key, const Tensor& value, const Tensor& out,
                                                         const Tensor& lse, const AttentionArguments& args) {
  if (grad_lse) return std::nullopt;
  const TorchKernel kernel = kernel_for(kernels, query, key, value, args, true);
  if (kernel == TorchKernel::kNone) return std::nullopt;
  const bool flash = kernel == TorchKernel::kFlash;
  const int64_t q_len = query.size(2), kv_len = key.size(2);
  const Tensor none, grad = grad_out.stride(3) == 1 ? grad_out : grad_out.contiguous();
  return try_kernel(flash ? kFlashBackward : kCudnnBackward, [&] {
    const auto [q, k, v] =
        flash ? at::_scaled_dot_product_flash_attention_backward(grad, query, key, value, out, lse, none, none, q_len,
                                                                 kv_len, 0., args.causal, none, none, args.scale)
              : at::_scaled_dot_product_cudnn_attention_backward(grad, query, key, value, out, lse.unsqueeze(-1), none,
                                                                 none, none, none, none, q_len, kv_len, 0., args.causal,
                                                                 args.scale);
    const Tensor empty = at::empty({0}, query.options());
    return AttentionGradients{as_ours(query, q), as_ours(key, k), as_ours(value, v), empty, empty};
  });
}

std::vector<std::pair<std::string, int64_t>> torch_kernel_report() {
  std::vector<std::pair<std::string, int64_t>> report;
  for (int i = 0; i < kOutcomes; ++i)
    if (const int64_t calls = outcome_counts[i].load()) report.emplace_back(kOutcomeNames[i], calls);
  return report;
}

void reset_torch_kernel_report() {
  for (auto& count : outcome_counts) count = 0;
}

}  // namespace attnpack
