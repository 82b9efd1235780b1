#include <attnpack/layers/append.h>

#include <ATen/ATen.h>

#include <limits>

#include <attnpack/ops/kv_cache.h>

namespace attnpack {

using at::Tensor;

namespace {

// A copy of the cache that is differentiable in its new rows, and only in them: [B, Hkv, capacity, D].
Tensor with_new_rows(const Tensor& cache,
                     const Tensor& rows,                       // [B, Hkv, L, D]
                     const Tensor& past,                       // [B], lengths before the append
                     const std::optional<Tensor>& new_lens) {  // [B]
  const c10::SymInt capacity = cache.sym_size(2);
  const Tensor step = at::arange(rows.sym_size(2), past.options());
  Tensor target = past.unsqueeze(-1) + step;  // [B, L]
  // Rows that are not valid go to slots behind the end, which are cut off again.
  if (new_lens) target = at::where(step < new_lens->to(at::kLong).unsqueeze(-1), target, step + capacity);
  const Tensor room = at::constant_pad_nd_symint(cache.detach(), {0, 0, 0, rows.sym_size(2)});
  const Tensor index = target.unsqueeze(1).unsqueeze(-1).expand_symint(rows.sym_sizes());
  return room.scatter(2, index, rows).narrow_symint(2, 0, capacity);
}

}  // namespace

Room room_under(const CacheTensors& cache, const std::optional<Tensor>& mask) {
  Room room{cache.key, cache.value, std::nullopt};
  if (mask && mask->dim() > 0 && mask->sym_size(-1) != 1 && mask->sym_size(-1) < cache.key.sym_size(2)) {
    room.limit = mask->sym_size(-1);
    room.key = cache.key.narrow_symint(2, 0, *room.limit);
    room.value = cache.value.narrow_symint(2, 0, *room.limit);
  }
  return room;
}

Room append(const CacheTensors& cache, const Room& room, const Tensor& key, const Tensor& value, const Tensor& past,
            const std::optional<Tensor>& new_lens) {
  kv_cache_append_(cache.key, cache.value, cache.lengths, key, value, new_lens, room.limit);
  if (!at::GradMode::is_enabled() || !(key.requires_grad() || value.requires_grad())) return room;
  return {with_new_rows(room.key, key, past, new_lens), with_new_rows(room.value, value, past, new_lens), room.limit};
}

std::optional<Tensor> dropout_seed(double dropout_p) {
  if (dropout_p <= 0) return std::nullopt;
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong);
}

}  // namespace attnpack
