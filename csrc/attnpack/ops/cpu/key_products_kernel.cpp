#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/key_products.h>
#include <attnpack/ops/linear.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kMostRows = 4 * kFewRows;  // rows that share a kv head; more are faster in torch's matmul
constexpr int64_t kKeys = 256;               // of a unit

bool has_few_rows(const Tensor& query, const Tensor& key) {
  const auto dtype = query.scalar_type();
  return query.dim() == 4 && key.dim() == 4 && key.scalar_type() == dtype &&
         (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && key.size(0) == query.size(0) &&
         key.size(3) == query.size(3) && key.size(3) >= kFewRowsInputs && key.stride(3) == 1 && key.size(1) > 0 &&
         query.size(1) % key.size(1) == 0 && query.numel() > 0 && key.numel() > 0 &&
         query.size(1) / key.size(1) * query.size(2) <= (dtype == at::kFloat ? kFewRows : kMostRows);
}

// Keys are to queries what the weight of a linear layer is to its input.
Tensor stream_keys(const Tensor& query, const Tensor& key) {
  const Tensor rows = query.contiguous();
  const int64_t heads = query.size(1), kv_heads = key.size(1), length = query.size(2), keys = key.size(2);
  const int64_t group = heads / kv_heads * length, dim = query.size(3);
  const Tensor out = at::empty({query.size(0), heads, length, keys}, query.options().dtype(at::kFloat));
  LinearParams of_all{};
  of_all.rows = std::min(group, kFewRows);
  of_all.inputs = dim;
  of_all.outputs = keys;
  of_all.dtype = kernel_dtype(query.scalar_type());
  of_all.weight_stride = key.stride(2);
  of_all.float_out = true;
  const auto& kernels = kernels_in_use();
  const int64_t parts = (keys + kKeys - 1) / kKeys, pairs = query.size(0) * kv_heads;
  const auto* q = static_cast<const char*>(rows.const_data_ptr());
  const auto* k = static_cast<const char*>(key.const_data_ptr());
  auto* to = out.mutable_data_ptr<float>();
  const auto unit = [&](int64_t i, void* scratch) {
    const int64_t pair = i / parts, begin = i % parts * kKeys;
    LinearParams p = of_all;
    p.weight = k + (pair / kv_heads * key.stride(0) + pair % kv_heads * key.stride(1)) * key.element_size();
    for (int64_t first = 0; first < group; first += kFewRows) {
      p.rows = std::min(group - first, kFewRows);
      p.input = q + (pair * group + first) * dim * query.element_size();
      p.out = to + (pair * group + first) * keys;
      *static_cast<int64_t*>(scratch) = 0;  // the rows of another unit are packed there
      kernels.linear_rows(p, {begin, std::min(begin + kKeys, keys)}, scratch);
    }
  };
  // Reading a key from memory takes as long as some multiply-adds.
  const double work = static_cast<double>(group + 3) * dim * keys * pairs;
  for_each_unit(pairs * parts, work, kernels.linear_scratch(of_all), unit, true);
  return out;
}

Tensor key_products_cpu(const Tensor& query, const Tensor& key) {
  return has_few_rows(query, key) ? stream_keys(query, key) : key_products_formula(query, key);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("key_products", attnpack::key_products_cpu); }
