#include <attnpack/convert/pool.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/core/padded.h>

namespace attnpack::convert {

namespace {

// Each window x window region (run of window elements) holds its mean.
at::Tensor average_regions(const at::Tensor& weight, int64_t window) {
  for (const auto size : weight.sizes()) {
    ATTNPACK_CHECK(size % window == 0, "window: got ", window, ", which does not divide the sides ", weight.sizes(),
                   " of the weight; choose a common divisor, 1 for no averaging");
  }
  auto result = weight;
  for (int64_t dim = 0; dim < weight.dim(); ++dim) {
    const auto runs = result.unflatten(dim, {-1, window});
    result = runs.mean(dim + 1, true).expand_as(runs).flatten(dim, dim + 1);
  }
  return result;
}

// Drawn on the CPU, so that a seed means the same weights on every device.
at::Tensor draw_like(const at::Tensor& weight, at::IntArrayRef sizes, const std::optional<uint64_t>& seed) {
  std::optional<at::Generator> generator;
  if (seed) {
    generator = at::globalContext().defaultGenerator(at::kCPU).clone();
    generator->set_current_seed(*seed);
  }
  return at::randn(sizes, generator, at::kDouble).to(weight.device()) * weight.pow(2).mean().sqrt();
}

}  // namespace

void check_finite(const char* name, const at::Tensor& weight) {
  ATTNPACK_CHECK(!weight.defined() || weight.is_meta() || at::isfinite(weight).all().item<bool>(), name,
                 ": got a weight that holds NaN or Inf, want finite numbers; load the checkpoint again");
}

void check_numbers(const char* name, const at::Tensor& weight) {
  ATTNPACK_CHECK(!weight.is_meta(), name, ": got a weight on meta, where it has no numbers, and this conversion ",
                 "follows the numbers; load the checkpoint first, or take the method 'mean', 'first' or 'random'");
}

void check_head_weight(const char* name, const at::Tensor& weight, int64_t num_heads) {
  check_defined(name, weight);
  ATTNPACK_CHECK(weight.is_floating_point(), name, ": got dtype ", weight.scalar_type(),
                 ", want a floating one; a quantised weight must be dequantised first");
  ATTNPACK_CHECK(weight.dim() == 1 || weight.dim() == 2, name, ": got shape ", weight.sizes(),
                 ", want [num_heads * head_dim, width], or [num_heads * head_dim] of a bias");
  ATTNPACK_CHECK(num_heads >= 1, "num_heads: got ", num_heads, ", want at least 1");
  ATTNPACK_CHECK(weight.size(0) % num_heads == 0 && weight.numel() > 0, name, ": got shape ", weight.sizes(),
                 ", whose rows are not those of num_heads = ", num_heads, " heads");
}

at::Tensor pool_kv_heads(const at::Tensor& weight, int64_t num_heads, int64_t num_kv_heads,
                         const PoolOptions& options) {
  const at::NoGradGuard no_grad;
  check_head_weight("weight", weight, num_heads);
  const auto groups = resolve_groups(num_heads, num_kv_heads, options.groups());
  const auto& method = options.method();
  ATTNPACK_CHECK(method == "mean" || method == "first" || method == "random", "method: got '", method,
                 "', want 'mean', 'first' or 'random'");
  ATTNPACK_CHECK(!options.seed() || method == "random", "seed: got one for method '", method,
                 "', which draws nothing; leave it out");
  ATTNPACK_CHECK(options.window() >= 1, "window: got ", options.window(), ", want at least 1");

  check_finite("weight", weight);

  auto exact = weight.to(at::kDouble);
  if (options.window() > 1) exact = average_regions(exact, options.window());
  const auto heads = exact.unflatten(0, {num_heads, -1});  // [num_heads, D, ...]
  auto sizes = heads.sizes().vec();
  sizes[0] = num_kv_heads;
  at::Tensor merged;
  if (method == "random") {
    merged = draw_like(exact, sizes, options.seed());
  } else {
    std::vector<at::Tensor> parts;
    for (const auto& group : groups) {
      parts.push_back(method == "first"
                          ? heads.select(0, group[0])
                          : heads.index_select(0, at::tensor(group, at::kLong).to(weight.device())).mean(0));
    }
    merged = at::stack(parts);
  }
  return merged.flatten(0, 1).to(weight.scalar_type());
}

}  // namespace attnpack::convert
