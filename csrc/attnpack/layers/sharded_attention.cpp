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
  if (current) refuse_under(kUnderContextParallel, what, fix);
}

void refuse_under(const char* place, const char* what, const char* fix) {
  ATTNPACK_CHECK(false, what, " ", place, ", where no process has all keys: ", fix);
}

void refuse_single_process_inputs(const SingleProcessArguments& given, const char* place) {
  const auto refuse = [&](bool is_given, const char* name, const char* why) {
    ATTNPACK_CHECK(!is_given, name, ": got one ", place, ", which is not supported; ", why);
  };
  refuse(given.mask, "mask", "each rank would need its part of it: use causal, window or kv_lens");
  refuse(given.need_weights, "need_weights", "no rank has all scores: ask one process for them");
  refuse(given.cache, "cache", "prefill and decode with a ShardedCache, outside");
  refuse(given.cross, "context", "a ShardedCache holds only keys of self-attention: use a CrossCache");
  ATTNPACK_CHECK(given.dropout == 0, "dropout: got ", given.dropout, " in training ", place,
                 ", which is not supported: each rank would draw other numbers than one process; set it to 0, or call "
                 "eval()");
  ATTNPACK_CHECK(!given.rope_by_length, "rope: got frequencies that follow the length ", place,
                 ", which is not supported: use another scaling");
}

void refuse_named_keys(const std::optional<at::Tensor>& key_index, int64_t key_block) {
  ATTNPACK_CHECK(!key_index, "key_index: got a tensor ", key_index->sizes(),
                 ", which is not supported over several processes; each rank would need its rows of it: name the keys "
                 "on one process");
  ATTNPACK_CHECK(key_block == 1, "key_block: got ", key_block,
                 ", which is not supported over several processes, because key_index is not: leave it out");
}

void check_part_positions(const std::optional<at::Tensor>& positions, const c10::SymInt& length) {
  ATTNPACK_CHECK(!positions || (positions->dim() > 0 && positions->sym_size(-1) == length), "positions: got ",
                 positions->sym_sizes(), ", want ", length,
                 " of them: those of this rank's rows in the whole sequence");
}

}  // namespace attnpack
