#include <attnpack/ops/detail/sequences.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/read_numbers.h>

namespace attnpack {

using c10::SymInt;

bool has_shape(const Tensor& x, const std::vector<SymInt>& shape) {
  bool fits = x.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = x.sym_size(static_cast<int64_t>(i)) == shape[i];
  return fits;
}

void check_beside(const char* name, const Tensor& x, const FirstArgument& first) {
  ATTNPACK_CHECK(x.device() == first.x.device(), name, " is on ", x.device(), ", ", first.name, " on ",
                 first.x.device(), ": move one of them with .to()");
}

void check_numbers(const char* name, const std::optional<Tensor>& x, const char* names,
                   const std::vector<SymInt>& shape, const FirstArgument& first) {
  if (!x) return;
  ATTNPACK_CHECK(has_shape(*x, shape), name, ": got ", x->sym_sizes(), ", want ", names, " = ",
                 c10::SymIntArrayRef(shape));
  ATTNPACK_CHECK(at::isFloatingType(x->scalar_type()), name, ": got ", x->scalar_type(),
                 ", want a float dtype: call .float() on it");
  check_beside(name, *x, first);
}

namespace {

void check_lengths(const char* name, const Tensor& x, const FirstArgument& first) {
  ATTNPACK_CHECK(is_int32_or_int64(x), name, ": got ", x.scalar_type(), ", want int32 or int64: call .long() on it");
  check_beside(name, x, first);
}

}  // namespace

void check_sequences(const std::optional<Tensor>& kv_lens, const std::optional<Tensor>& cu_seqlens,
                     const FirstArgument& first) {
  const SymInt batch = first.x.sym_size(0);
  if (cu_seqlens) {
    ATTNPACK_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->sym_size(0) >= 1, "cu_seqlens: got ", cu_seqlens->sym_sizes(),
                   ", want [sequences + 1]: where each sequence begins, and the end of the last");
    check_lengths("cu_seqlens", *cu_seqlens, first);
    ATTNPACK_CHECK(batch == 1, "cu_seqlens: got a batch of ", batch,
                   ", want packed sequences, one after the other in a batch of 1");
    ATTNPACK_CHECK(!kv_lens, "kv_lens: got a tensor beside cu_seqlens, want one of them: cu_seqlens says where ",
                   "each sequence ends");
  }
  if (kv_lens) {
    ATTNPACK_CHECK(has_shape(*kv_lens, {batch}), "kv_lens: got ", kv_lens->sym_sizes(), ", want [B] = [", batch,
                   "]: one number per sequence");
    check_lengths("kv_lens", *kv_lens, first);
  }
}

SymInt count_sequences(const std::optional<Tensor>& cu_seqlens, const Tensor& x) {
  return cu_seqlens ? cu_seqlens->sym_size(0) - 1 : x.sym_size(0);
}

std::vector<int64_t> read_ends(const Tensor& cu_seqlens, int64_t length, const char* first) {
  std::vector<int64_t> ends = read_numbers(cu_seqlens);
  ATTNPACK_CHECK(ends.front() == 0, "cu_seqlens[0]: got ", ends.front(), ", want 0: the first sequence begins there");
  for (size_t n = 0; n + 1 < ends.size(); ++n)
    ATTNPACK_CHECK(ends[n] <= ends[n + 1], "cu_seqlens[", n + 1, "]: got ", ends[n + 1], " after ", ends[n],
                   ", want numbers that never fall");
  ATTNPACK_CHECK(ends.back() == length, "cu_seqlens: got ", ends.back(), " at the end, want ", length,
                 ", the tokens of ", first);
  return ends;
}

std::vector<int64_t> read_lens(const Tensor& kv_lens, int64_t length, const char* first) {
  std::vector<int64_t> lens = read_numbers(kv_lens);
  for (size_t b = 0; b < lens.size(); ++b)
    ATTNPACK_CHECK(lens[b] >= 0 && lens[b] <= length, "kv_lens[", b, "]: got ", lens[b], ", want 0 to ", length,
                   ", the tokens of ", first);
  return lens;
}

Tensor padding_of(const Tensor& kv_lens, const SymInt& length) {
  return at::arange(length, kv_lens.options()).unsqueeze(0).ge(kv_lens.unsqueeze(1));
}

}  // namespace attnpack
