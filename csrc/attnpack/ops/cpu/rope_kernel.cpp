#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/rope_rows.h>
#include <attnpack/ops/detail/rope_args.h>
#include <attnpack/threads/threads.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace attnpack {
namespace {

using at::Tensor;

// x [B, H, L, D] -> out, rows rotated by cos and sin [B, H, L, half], all by strides.
template <class T, class Table>
void rotate_rows(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out) {
  const int64_t heads = x.size(1), length = x.size(2), dim = x.size(3), half = cos.size(3);
  for_each_range(
      x.size(0) * heads * length, std::max<int64_t>(1, 16384 / std::max<int64_t>(dim, 1)),
      [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t b = row / length / heads, h = row / length % heads, l = row % length;
          const auto at_row = [&](const Tensor& t) { return b * t.stride(0) + h * t.stride(1) + l * t.stride(2); };
          const auto table = [&](const Tensor& t) {
            return Strided<const Table>{t.const_data_ptr<Table>() + at_row(t), t.stride(3)};
          };
          rotate_row<T, Table>({x.const_data_ptr<T>() + at_row(x), x.stride(3)}, table(cos), table(sin), half, dim,
                               interleaved, {out.mutable_data_ptr<T>() + at_row(out), out.stride(3)});
        }
      });
}

Tensor apply_rope_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_rope(x, cos, sin);
  const Tensor out = at::empty_like(x);
  auto shape = x.sizes().vec();
  shape.back() = cos.size(-1);
  // Both have one shape before their leading dimensions are joined, so rows agree.
  const Tensor flat = four_dimensions(x), c = four_dimensions(cos.expand(shape)),
               s = four_dimensions(sin.expand(shape));
  Tensor target = x.dim() <= 4 ? four_dimensions(out) : at::empty_like(flat);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "apply_rope", [&] {
    if (cos.scalar_type() == at::kDouble)
      rotate_rows<scalar_t, double>(flat, c, s, interleaved, target);
    else
      rotate_rows<scalar_t, float>(flat, c, s, interleaved, target);
  });
  if (x.dim() > 4) out.copy_(target.view(x.sizes()));
  return out;
}

// cos and sin of count positions, [count, half] each: angles in fp64.
void fill_table(const int64_t* position, int64_t count, at::ArrayRef<double> inv_freq, double factor, float* cos,
                float* sin) {
  const int64_t half = static_cast<int64_t>(inv_freq.size());
  for_each_range(count, 64, [&](int64_t begin, int64_t end) {
    for (int64_t l = begin; l < end; ++l) fill_angles(position[l], inv_freq, factor, cos + l * half, sin + l * half);
  });
}

std::tuple<Tensor, Tensor> rope_table_cpu(const Tensor& positions, at::ArrayRef<double> inv_freq, double factor) {
  check_rope_positions(positions);
  auto shape = positions.sizes().vec();
  shape.push_back(static_cast<int64_t>(inv_freq.size()));
  const Tensor cos = at::empty(shape, positions.options().dtype(at::kFloat)), sin = at::empty_like(cos);
  const Tensor flat = positions.contiguous();
  fill_table(flat.const_data_ptr<int64_t>(), flat.numel(), inv_freq, factor, cos.mutable_data_ptr<float>(),
             sin.mutable_data_ptr<float>());
  return {cos, sin};
}

// The frequencies of a sequence of the given length.
std::vector<double> frequencies_at(double length, at::ArrayRef<double> inv_freq, at::ArrayRef<double> long_inv_freq,
                                   double growth, double trained) {
  if (length <= trained) return inv_freq.vec();
  if (!long_inv_freq.empty()) return long_inv_freq.vec();
  std::vector<double> result = inv_freq.vec();
  if (growth <= 0) return result;
  const double r = 2.0 * static_cast<double>(inv_freq.size()), grown = growth * length / trained - (growth - 1);
  for (size_t i = 0; i < result.size(); ++i) result[i] *= std::pow(grown, -2.0 * static_cast<double>(i) / (r - 2));
  return result;
}

std::tuple<Tensor, Tensor> rope_table_by_length_cpu(const Tensor& positions, const std::optional<Tensor>& lengths,
                                                    at::ArrayRef<double> inv_freq, double factor,
                                                    at::ArrayRef<double> long_inv_freq, double growth,
                                                    int64_t trained_len) {
  check_rope_by_length(positions, lengths, inv_freq, long_inv_freq, trained_len);
  const auto symbolic = rope_table_shape(positions, lengths, inv_freq);
  const auto shape = C10_AS_INTARRAYREF_SLOW(symbolic);
  const Tensor cos = at::empty(shape, positions.options().dtype(at::kFloat)), sin = at::empty_like(cos);
  const int64_t length = positions.size(-1), rows = shape.size() == 3 ? shape[0] : 1;
  const Tensor where = positions.contiguous(), seen = lengths ? lengths->to(at::kLong).contiguous() : Tensor();
  const int64_t half = static_cast<int64_t>(inv_freq.size());
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t* position =
        where.const_data_ptr<int64_t>() + (positions.dim() == 2 && positions.size(0) > 1 ? b * length : 0);
    const auto number = [](int64_t x) { return static_cast<double>(x); };
    const double long_as = lengths  ? number(seen.const_data_ptr<int64_t>()[seen.size(0) > 1 ? b : 0])
                           : length ? number(*std::max_element(position, position + length)) + 1
                                    : 0;
    const auto theta = frequencies_at(long_as, inv_freq, long_inv_freq, growth, number(trained_len));
    const int64_t offset = b * length * half;
    fill_table(position, length, theta, factor, cos.mutable_data_ptr<float>() + offset,
               sin.mutable_data_ptr<float>() + offset);
  }
  return {cos, sin};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("apply_rope", attnpack::apply_rope_cpu);
  m.impl("rope_table", attnpack::rope_table_cpu);
  m.impl("rope_table_by_length", attnpack::rope_table_by_length_cpu);
}
