#include <attnpack/ops/cpu/isa/softmax.h>

// Prefill: rows of a kv head in tiles, keys in blocks, both products by gemm; nothing of size q_len x kv_len.
namespace attnpack::ATTNPACK_ISA {
namespace {

// Keys of a block: scores, packed keys and values of a block stay in the L2 cache.
int64_t block_keys(const AttentionParams& p) {
  const int64_t width = p.head_dim + p.v_head_dim;
  return width <= 256 ? 256 : width <= 512 ? 128 : 64;
}

template <class S, class A>
struct Scratch {
  int64_t block, value_width;
  PackedBlocks blocks;
  A *query, *scores, *out, *max, *sum, *keys, *values;

  Scratch(const AttentionParams& p, Arena& arena) : block(block_keys(p)), blocks(p.kv_len, block, arena) {
    value_width = padded<A>(p.v_head_dim);
    query = arena.take<A>(kTileQueryRows * p.head_dim);
    scores = arena.take<A>(kTileQueryRows * block);
    out = arena.take<A>(kTileQueryRows * value_width);
    max = arena.take<A>(kTileQueryRows);
    sum = arena.take<A>(kTileQueryRows);
    keys = arena.take<A>(blocks.slots() * block * p.head_dim);
    values = arena.take<A>(blocks.slots() * block * value_width);
  }
};

template <class S, class A>
class PrefillTile {
 public:
  PrefillTile(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, void* scratch)
      : p_(p), b_(b), kv_head_(kv_head), arena_(scratch), w_(p, arena_) {
    w_.blocks.enter(b * p.num_kv_heads + kv_head);
    make_rows(p, b, kv_head, rows, tile_);
    pack_rows<A, S>(tile_, p.query, p.query_strides, b, p.head_dim, w_.query, p.head_dim);
  }

  void run() {
    attend();
    for (int64_t r = 0; r < tile_.count; ++r)
      finish_row<A, S>(p_, b_, tile_.rows[r].head, tile_.rows[r].query, w_.max[r], w_.sum[r],
                       w_.out + r * w_.value_width);
  }

 private:
  void attend() {
    attend(false);
    // An excluded key's NaN or Inf may have come in as 0 * NaN: once more, leaving such terms out.
    if (!all_finite(w_.out, w_.value_width, tile_.count, p_.v_head_dim)) attend(true);
  }

  void attend(bool skip_excluded) {
    start(state_, tile_.count);
    for (int64_t begin = tile_.keys.begin / w_.block * w_.block; begin < tile_.keys.end; begin += w_.block)
      attend_block(begin, smaller(w_.block, tile_.keys.end - begin), skip_excluded);
  }

  void attend_block(int64_t begin, int64_t count, bool skip_excluded) {
    const int64_t slot = w_.blocks.slot(begin, [&](int64_t slot) { pack_block(begin, slot); });
    const A* keys = w_.keys + slot * w_.block * p_.head_dim;
    const A* values = w_.values + slot * w_.block * w_.value_width;
    gemm<A>(false, tile_.count, count, p_.head_dim, {w_.query, p_.head_dim, 1},
            {keys, kPanel<A>, kPanel<A> * p_.head_dim}, w_.scores, w_.block, false);
    softmax_rows<A>(p_, b_, tile_, state_, 0, tile_.count, begin, count);
    gemm<A>(skip_excluded, tile_.count, w_.value_width, count, {w_.scores, w_.block, 1},
            {values, kPanel<A>, kPanel<A> * w_.block}, w_.out, w_.value_width, true);
  }

  void pack_block(int64_t begin, int64_t slot) {
    const int64_t count = smaller(w_.block, valid_keys(p_, b_) - begin);
    pack_transposed<A>(at<S>(p_.key, p_.key_strides, b_, kv_head_, begin), p_.key_strides.row, count, p_.head_dim,
                       w_.keys + slot * w_.block * p_.head_dim);
    pack_panels<A>(at<S>(p_.value, p_.value_strides, b_, kv_head_, begin), p_.value_strides.row, count, p_.v_head_dim,
                   w_.values + slot * w_.block * w_.value_width, w_.block);
  }

  const AttentionParams& p_;
  int64_t b_, kv_head_;
  Arena arena_;
  Scratch<S, A> w_;
  const RowState<A> state_{w_.scores, w_.out, w_.max, w_.sum, w_.block, w_.value_width};
  RowTile tile_;
};

}  // namespace

size_t prefill_scratch(const AttentionParams& p) {
  size_t used = 0;
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    Arena arena(nullptr);
    Scratch<decltype(storage), decltype(accumulation)>(p, arena);
    used = arena.used();
  });
  return used;
}

void prefill(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, void* scratch) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    PrefillTile<decltype(storage), decltype(accumulation)>(p, b, kv_head, rows, scratch).run();
  });
}

}  // namespace attnpack::ATTNPACK_ISA
