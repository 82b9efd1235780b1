#include <attnpack/layers/detail/best_numbers.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <attnpack/threads/threads.h>

namespace attnpack {

using at::Tensor;
using c10::SymInt;

namespace {

template <class T>
struct Scored {
  T score;
  int32_t place;
  bool operator<(const Scored& other) const {  // is better than
    return score > other.score || (score == other.score && place < other.place);
  }
};

template <class T>
void best_of_row(const T* scores, int64_t keys, int64_t n, int32_t* out) {
  std::vector<Scored<T>> found(keys);
  for (int64_t j = 0; j < keys; ++j)
    found[j] = {std::isnan(scores[j]) ? std::numeric_limits<T>::infinity() : scores[j], static_cast<int32_t>(j)};
  if (n < keys) std::nth_element(found.begin(), found.begin() + n, found.end());
  std::sort(found.begin(), found.begin() + n);
  for (int64_t i = 0; i < n; ++i) out[i] = found[i].score == -std::numeric_limits<T>::infinity() ? -1 : found[i].place;
}

template <class T>
Tensor best_on_cpu(const Tensor& given, int64_t n) {
  const Tensor scores = given.contiguous();
  auto sizes = scores.sizes().vec();
  const int64_t keys = sizes.back();
  sizes.back() = n;
  const Tensor out = at::empty(sizes, scores.options().dtype(at::kInt));
  const auto* from = scores.const_data_ptr<T>();
  auto* to = out.mutable_data_ptr<int32_t>();
  constexpr int64_t kSerial = 1 << 14;  // numbers that one thread is as fast with
  for_each_range(scores.numel() / keys, std::max<int64_t>(kSerial / keys, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) best_of_row(from + row * keys, keys, n, to + row * n);
  });
  return out;
}

}  // namespace

Tensor best_numbers_formula(const Tensor& scores, const SymInt& n) {
  const SymInt keys = scores.sym_size(-1);
  if (keys == 0) return scores.to(at::kInt);
  // topk breaks ties differently when there are more keys, and relu makes many ties at 0.
  const Tensor least = std::get<0>(scores.topk_symint(n, -1)).narrow_symint(-1, n - 1, 1);
  const Tensor above = scores > least, equal = scores == least;
  const Tensor room = above.sum(-1, /*keepdim=*/true).neg() + at::Scalar(n);
  const Tensor kept = above.logical_or(equal.logical_and(equal.cumsum(-1, at::kInt) <= room));
  const Tensor count = at::arange(keys, at::TensorOptions(at::kLong).device(scores.device()));
  const Tensor rank = (count.neg() + at::Scalar(keys)).masked_fill(kept.logical_not(), 0);
  const Tensor index = std::get<1>(rank.topk_symint(n, -1));  // in rising order
  const auto [sorted, order] = scores.gather(-1, index).sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  return index.gather(-1, order).masked_fill(sorted == -kInf, -1).to(at::kInt);
}

Tensor best_numbers(const Tensor& scores, const SymInt& n) {
  const bool wide = scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble;
  const auto keys = scores.sym_size(-1).maybe_as_int(), most = n.maybe_as_int();
  if (!wide || !keys || !most || *keys == 0 || *keys > std::numeric_limits<int32_t>::max() || !scores.is_cpu() ||
      at::isTensorSubclassLike(scores))
    return best_numbers_formula(scores, n);
  return scores.scalar_type() == at::kFloat ? best_on_cpu<float>(scores, *most) : best_on_cpu<double>(scores, *most);
}

}  // namespace attnpack
