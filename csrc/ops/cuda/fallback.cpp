#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/attention_args.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/rope_args.h>

// Until the CUDA kernels exist: the same contract by compositions of ATen ops, slower and with the scores in memory.
namespace attnpack {
namespace {

void warn_once() {
  TORCH_WARN_ONCE(
      "attnpack: no CUDA kernels in this build; CUDA tensors run through a composition of ATen ops with "
      "the same results, which holds the scores [batch, num_heads, q_len, kv_len] in memory.");
}

AttentionResult attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS) {
  warn_once();
  return attention_formula(query, key, value, ATTNPACK_ATTENTION_ARGS);
}

// Differentiates the formula, so that compiled graphs find the op that they recorded.
AttentionGradients attention_backward_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                           const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& lse, ATTNPACK_ATTENTION_PARAMS,
                                           bool mask_gradient, bool sinks_gradient) {
  ATTNPACK_CHECK(dropout_p == 0, "dropout_p is ", dropout_p,
                 ", wants 0 on CUDA under torch.compile: the composition "
                 "of ATen ops cannot draw the same mask twice");
  const at::AutoGradMode enable(true);
  const auto leaf = [](const Tensor& t, bool wanted) { return t.detach().requires_grad_(wanted); };
  const Tensor q = leaf(query, true), k = leaf(key, true), v = leaf(value, true);
  std::vector<Tensor> inputs{q, k, v};
  std::optional<Tensor> m = mask, s = sinks;
  if (mask_gradient) inputs.push_back(*(m = leaf(*mask, true)));
  if (sinks_gradient) inputs.push_back(*(s = leaf(*sinks, true)));
  const auto [o, l] = attention_formula(q, k, v, m, causal, q_offset, q_offsets, window_left, window_right, kv_lens,
                                        softcap, s, alibi_slopes, head_map, dropout_p, dropout_seed, scale);
  Tensor total = (o * grad_out).sum();
  if (grad_lse) total = total + (l * *grad_lse).sum();
  total.backward({}, std::nullopt, false, inputs);
  const auto none = [&] { return at::empty({0}, query.options()); };
  const auto laid = [](const Tensor& t) { return t.grad().transpose(1, 2).contiguous().transpose(1, 2); };
  return {laid(q), laid(k), laid(v), mask_gradient ? m->grad() : none(), sinks_gradient ? s->grad() : none()};
}

std::tuple<Tensor, Tensor> rope_table_cuda(const Tensor& positions, at::ArrayRef<double> inv_freq, double factor) {
  const auto options = at::TensorOptions(at::kDouble).device(positions.device());
  const Tensor angles = positions.unsqueeze(-1).to(at::kDouble) * at::tensor(inv_freq, options);
  return {(angles.cos() * factor).to(at::kFloat), (angles.sin() * factor).to(at::kFloat)};
}

std::tuple<Tensor, Tensor> rope_table_by_length_cuda(const Tensor& positions, const std::optional<Tensor>& lengths,
                                                     at::ArrayRef<double> inv_freq, double factor,
                                                     at::ArrayRef<double> long_inv_freq, double growth,
                                                     int64_t trained_len) {
  check_rope_by_length(positions, lengths, inv_freq, long_inv_freq, trained_len);
  const auto options = at::TensorOptions(at::kDouble).device(positions.device());
  const auto trained = static_cast<double>(trained_len);
  Tensor seen = lengths ? *lengths : at::full({1}, trained_len, options);
  if (!lengths && positions.numel() > 0) seen = positions.amax(-1) + 1;
  seen = seen.to(at::kDouble).view({-1, 1}).clamp_min(trained);  // [B, 1]
  Tensor theta = at::tensor(inv_freq, options);
  if (!long_inv_freq.empty()) {
    theta = at::where(seen > trained, at::tensor(long_inv_freq, options), theta);
  } else if (growth > 0) {
    const double r = 2.0 * static_cast<double>(inv_freq.size());
    theta = theta * (growth * seen / trained - (growth - 1)).pow(at::arange(inv_freq.size(), options) * (-2 / (r - 2)));
  }
  const Tensor angles = (positions.unsqueeze(-1).to(at::kDouble) * theta.unsqueeze(-2))
                            .reshape_symint(rope_table_shape(positions, lengths, inv_freq));
  return {(angles.cos() * factor).to(at::kFloat), (angles.sin() * factor).to(at::kFloat)};
}

// Positions beyond the capacity are dropped, so that no call waits for the device.
void kv_cache_append_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt>) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens);
  if (key.size(2) == 0) return;
  const Tensor counts = new_lens ? new_lens->to(at::kLong) : at::full_like(lengths, key.size(2));
  // Slot j of sequence b takes new position j - lengths[b], where there is one.
  const Tensor source = at::arange(cache_key.size(2), lengths.options()) - lengths.unsqueeze(1);  // [B, capacity]
  const Tensor fresh = source.ge(0).logical_and(source < counts.unsqueeze(1)).unsqueeze(1).unsqueeze(-1);
  const Tensor index = source.clamp(0, key.size(2) - 1).unsqueeze(1).unsqueeze(-1);
  const auto write = [&](const Tensor& cache, const Tensor& x) {
    cache.copy_(at::where(fresh, x.gather(2, index.expand(cache.sizes())), cache));
  };
  write(cache_key, key);
  write(cache_value, value);
  lengths.add_(counts).clamp_max_(cache_key.size(2));
}

Tensor null_cuda(const Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("attention", attnpack::attention_cuda);
  m.impl("attention_backward", attnpack::attention_backward_cuda);
  m.impl("apply_rope", attnpack::rope_formula);
  m.impl("rope_table", attnpack::rope_table_cuda);
  m.impl("rope_table_by_length", attnpack::rope_table_by_length_cuda);
  m.impl("kv_cache_append_", attnpack::kv_cache_append_cuda);
  m.impl("null", attnpack::null_cuda);
}
