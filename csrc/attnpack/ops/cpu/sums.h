#pragma once

#include <ATen/ATen.h>

#include <attnpack/ops/detail/attention_params.h>

namespace attnpack {

// The sum of all elements, [1], in one order. at::sum splits such a sum over the threads, so its rounding depends on
// their number.
inline Tensor sum_in_order(const Tensor& x) {
  const Tensor terms = x.to(at::kDouble).contiguous();
  double sum = 0;
  for (int64_t i = 0; i < terms.numel(); ++i) sum += terms.const_data_ptr<double>()[i];
  return at::full({1}, sum, x.options());
}

// The gradient of sinks [num_heads], in their dtype.
inline Tensor sinks_gradient_in_order(const Tensor& sinks, const Tensor& lse, const Tensor& delta) {
  const Tensor terms = sink_terms(sinks, lse, delta);
  return (terms.size(1) == 1 ? sum_in_order(terms) : terms.sum(at::IntArrayRef{0, 2})).to(sinks.scalar_type());
}

}  // namespace attnpack
