#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <vector>

// What the ops over sequences with a state have in common: checks of their arguments against the first one, and the
// lengths of the sequences.
namespace attnpack {

using at::Tensor;

// The argument that says batch, length, dtype and device.
struct FirstArgument {
  const char* name;
  const Tensor& x;
};

bool has_shape(const Tensor& x, const std::vector<c10::SymInt>& shape);

void check_beside(const char* name, const Tensor& x, const FirstArgument& first);

// Checks that x, if given, is of a float dtype and of this shape, whose sizes are called `names`.
void check_numbers(const char* name, const std::optional<Tensor>& x, const char* names,
                   const std::vector<c10::SymInt>& shape, const FirstArgument& first);

// Checks kv_lens [B] and cu_seqlens [N + 1], of which at most one is given. The values are not read.
void check_sequences(const std::optional<Tensor>& kv_lens, const std::optional<Tensor>& cu_seqlens,
                     const FirstArgument& first);

// How many sequences there are.
c10::SymInt count_sequences(const std::optional<Tensor>& cu_seqlens, const Tensor& x);

// Their numbers, checked against the tokens of the first argument.
std::vector<int64_t> read_ends(const Tensor& cu_seqlens, int64_t length, const char* first);
std::vector<int64_t> read_lens(const Tensor& kv_lens, int64_t length, const char* first);

// Whether a token stands after the end of its sequence, bool [B, L].
Tensor padding_of(const Tensor& kv_lens, const c10::SymInt& length);

}  // namespace attnpack
