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
  int64_t block, blocks, key_width, value_width;
  bool resident;  // all blocks stay packed for the next tile
  int64_t* head;  // b * num_kv_heads + kv_head + 1 of what is packed
  char* packed;   // [blocks]
  A *query, *scores, *out, *max, *sum, *keys, *values;

  Scratch(const AttentionParams& p, Arena& arena) {
    block = block_keys(p);
    const int64_t all = (p.kv_len + block - 1) / block;
    resident = all * block <= kPackedKeys;
    blocks = resident ? larger(all, 1) : 1;
    key_width = p.head_dim;
    value_width = padded<A>(p.v_head_dim);
    head = arena.take<int64_t>(1);
    packed = arena.take<char>(blocks);
    query = arena.take<A>(kTileQueryRows * p.head_dim);
    scores = arena.take<A>(kTileQueryRows * block);
    out = arena.take<A>(kTileQueryRows * value_width);
    max = arena.take<A>(kTileQueryRows);
    sum = arena.take<A>(kTileQueryRows);
    keys = arena.take<A>(blocks * block * key_width);
    values = arena.take<A>(blocks * block * value_width);
  }

  void pack_block(const AttentionParams& p, int64_t b, int64_t kv_head, int64_t begin, int64_t count, int64_t slot) {
    pack_transposed<A>(at<S>(p.key, p.key_strides, b, kv_head, begin), p.key_strides.row, count, p.head_dim,
                       keys + slot * block * key_width);
    pack_panels<A>(at<S>(p.value, p.value_strides, b, kv_head, begin), p.value_strides.row, count, p.v_head_dim,
                   values + slot * block * value_width, block);
  }
};

template <class S, class A>
class PrefillTile {
 public:
  PrefillTile(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, void* scratch)
      : p_(p), b_(b), kv_head_(kv_head), arena_(scratch), w_(p, arena_) {
    const int64_t head = b * p.num_kv_heads + kv_head + 1;
    if (*w_.head != head) {
      *w_.head = head;
      for (int64_t i = 0; i < w_.blocks; ++i) w_.packed[i] = 0;
    }
    make_rows(p, b, kv_head, rows, tile_);
    pack_rows<A, S>(tile_, p.query, p.query_strides, b, p.head_dim, w_.query, p.head_dim);
  }

  void run() {
    attend(false);
    // An excluded key's NaN or Inf may have come in as 0 * NaN: once more, leaving such terms out.
    if (!all_finite(w_.out, w_.value_width, tile_.count, p_.v_head_dim)) attend(true);
    for (int64_t r = 0; r < tile_.count; ++r)
      finish_row<A, S>(p_, b_, tile_.rows[r].head, tile_.rows[r].query, w_.max[r], w_.sum[r],
                       w_.out + r * w_.value_width);
  }

 private:
  void attend(bool skip_excluded) {
    for (int64_t r = 0; r < tile_.count; ++r) {
      w_.max[r] = A(-kInfinity);
      w_.sum[r] = 0;
    }
    for (int64_t i = 0; i < tile_.count * w_.value_width; ++i) w_.out[i] = 0;
    for (int64_t begin = tile_.keys.begin / w_.block * w_.block; begin < tile_.keys.end; begin += w_.block)
      attend_block(begin, smaller(w_.block, tile_.keys.end - begin), skip_excluded);
  }

  void attend_block(int64_t begin, int64_t count, bool skip_excluded) {
    const int64_t slot = w_.resident ? begin / w_.block : 0;
    if (!w_.resident || !w_.packed[slot]) {
      const int64_t all = smaller(w_.block, p_.kv_len - begin);
      w_.pack_block(p_, b_, kv_head_, begin, p_.kv_lens ? smaller(all, p_.kv_lens[b_] - begin) : all, slot);
      w_.packed[slot] = 1;
    }
    const A* keys = w_.keys + slot * w_.block * w_.key_width;
    gemm<A>(false, tile_.count, count, p_.head_dim, {w_.query, p_.head_dim, 1},
            {keys, kPanel<A>, kPanel<A> * w_.key_width}, w_.scores, w_.block, false);
    for (int64_t r = 0; r < tile_.count; ++r) softmax_row(r, begin, count);
    const A* values = w_.values + slot * w_.block * w_.value_width;
    gemm<A>(skip_excluded, tile_.count, w_.value_width, count, {w_.scores, w_.block, 1},
            {values, kPanel<A>, kPanel<A> * w_.block}, w_.out, w_.value_width, true);
  }

  void softmax_row(int64_t r, int64_t begin, int64_t count) {
    A* s = w_.scores + r * w_.block;
    finish_scores<A>(p_, b_, tile_.rows[r], begin, count, s);
    const int64_t whole = (count + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    const A factor = online_softmax<A>(s, whole, w_.max[r], w_.sum[r]);
    if (p_.dropout_p > 0) drop<A>(p_, b_, tile_.rows[r], begin, count, s);
    if (factor == 1) return;
    A* out = w_.out + r * w_.value_width;
    for (int64_t d = 0; d < w_.value_width; d += kLanes<A>) store<A>(out + d, factor * load<A>(out + d));
  }

  const AttentionParams& p_;
  int64_t b_, kv_head_;
  Arena arena_;
  Scratch<S, A> w_;
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
