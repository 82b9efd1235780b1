#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/layers/attend.h>
#include <attnpack/layers/latent_attend.h>

#include <optional>

namespace attnpack {

// Attends in place of a layer's function where a sequence is sharded over several processes
// (distributed/context_parallel.h).
class ShardedAttention {
 public:
  virtual ~ShardedAttention() = default;
  // As attnpack::attend, for this process's rows over the keys of all.
  virtual at::Tensor attend(const at::Tensor& query,                  // [B, Hq, L, D], before rotation
                            const at::Tensor& key,                    // [B, Hkv, Lkv, D], before rotation
                            const at::Tensor& value,                  // [B, Hkv, Lkv, Dv]
                            const AttendOptions& options) const = 0;  // -> [B, L, Hq * Dv]
  // As attnpack::latent_attend.
  virtual at::Tensor latent_attend(const at::Tensor& query,                // [B, H, L, N + R], before rotation
                                   const at::Tensor& latent,               // [B, Lkv, C], after its norm
                                   const at::Tensor& k_rope,               // [B, Lkv, R], before rotation
                                   const std::optional<at::Tensor>& kv_b,  // [H * (N + V), C]
                                   int64_t v_dim,
                                   const LatentAttendOptions& options) const = 0;  // -> [B, L, H * V or H * C]
  // The positions in the whole sequence of this process's `length` rows, int64 [length].
  virtual at::Tensor positions(int64_t length) const = 0;
};

// The object that attends for the layers of this thread; nullptr where the process has all keys.
const ShardedAttention* sharded_attention();

// Puts another one in its place, and returns the one before.
const ShardedAttention* set_sharded_attention(const ShardedAttention* over);

// Raises under ContextParallel, where `what` is not supported.
void refuse_context_parallel(const char* what, const char* fix);

// The functions below raise for what is not supported where several processes hold the keys, in both languages. place:
// where the call is made.
inline constexpr char kUnderContextParallel[] = "under ContextParallel";
[[noreturn]] void refuse_under(const char* place, const char* what, const char* fix);

// Inputs of a call that only one process can serve: which of them it gives.
struct SingleProcessArguments {
  bool mask = false, need_weights = false, cache = false;
  bool cross = false;           // a context beside a sharded cache
  double dropout = 0;           // in training
  bool rope_by_length = false;  // frequencies follow the length
};
void refuse_single_process_inputs(const SingleProcessArguments& given, const char* place = kUnderContextParallel);

// Raises for keys by their numbers.
void refuse_named_keys(const std::optional<at::Tensor>& key_index, int64_t key_block);

// Raises unless positions, if given, are those of this process's `length` rows.
void check_part_positions(const std::optional<at::Tensor>& positions, const c10::SymInt& length);

}  // namespace attnpack
