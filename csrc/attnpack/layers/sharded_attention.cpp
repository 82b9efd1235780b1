#include <attnpack/layers/sharded_attention.h>

#include <attnpack/core/check.h>

#include <utility>

namespace attnpack {

namespace {

thread_local const ShardedAttention* current = nullptr;

}  // namespace

const ShardedAttention* sharded_attention() { return current; }

const ShardedAttention* set_sharded_attention(const ShardedAttention* over) { return std::exchange(current, over); }

void refuse_context_parallel(const char* what, const char* fix) {
  ATTNPACK_CHECK(!current, what, " under ContextParallel, where no process has all keys: ", fix);
}

}  // namespace attnpack
