#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <algorithm>
#include <optional>
#include <vector>

// The common parts of the ops over sequences with a state: checks of their arguments against the first one, and the
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

// The lengths of a call's sequences, as numbers, to which the kernels' params point.
struct SequenceLengths {
  std::vector<int64_t> ends, lens;
  int64_t length = 0;

  // Fills the params' ends, kv_lens and sequences from the arguments; p.length is that of the first argument.
  template <typename Params, typename Arguments>
  void read(Params& p, const Arguments& args, int64_t batch, const char* first) {
    length = p.length;
    if (args.cu_seqlens) {
      ends = read_ends(*args.cu_seqlens, length, first);
      p.ends = ends.data();
    }
    if (args.kv_lens) {
      lens = read_lens(*args.kv_lens, length, first);
      p.kv_lens = lens.data();
    }
    p.sequences = args.cu_seqlens ? static_cast<int64_t>(ends.size()) - 1 : batch;
  }

  int64_t tokens(int64_t sequence) const {
    return !ends.empty() ? ends[sequence + 1] - ends[sequence] : lens.empty() ? length : lens[sequence];
  }
  bool has_padding() const {
    return std::any_of(lens.begin(), lens.end(), [this](int64_t tokens) { return tokens < length; });
  }
};

// Whether a token stands after the end of its sequence, bool [B, L].
Tensor padding_of(const Tensor& kv_lens, const c10::SymInt& length);

}  // namespace attnpack
