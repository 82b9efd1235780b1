#pragma once

#include <attnpack/ops/cuda/kernels/plan.h>
#include <attnpack/ops/cuda/kernels/exact.cuh>

// Backward: the probabilities P are recomputed from lse.
//   D = rowsum(dO * O) - dlse,  dS = P * (dO V^T - D),
//   dV = P^T dO,  dQ = scale dS K,  dK = scale dS^T Q.
// Each gradient has one kernel, and all kernels have one form: 16 owners (rows for dQ, keys for dK and dV) gather from
// all the others (keys, or rows). Nothing is added up between blocks, so every sum has one fixed order. The price is
// that products are formed more than once.
namespace attnpack::cuda {

constexpr int kBackwardThreads = 128;  // threads, and also columns, of a block

// How many blocks one gradient takes; most_group as in plan_forward.
static inline int64_t backward_blocks(const AttentionParams& p, Gradient of, int64_t most_group) {
  const int64_t width = of == Gradient::kValue ? p.v_head_dim : p.head_dim;
  const int64_t columns = (width + kBackwardThreads - 1) / kBackwardThreads;
  // The mask's gradient is computed along with the query's, even if head_dim is 0.
  return p.batch * p.num_kv_heads * count_tiles(p, owners_of(p, of, most_group), kOwners) *
         (of == Gradient::kQuery && columns == 0 ? 1 : columns);
}

// The weight of a pair, which multiplies the other's row in the owner's sum: P after dropout for values, scale dS for
// keys and queries.
template <Gradient Of, class A>
ATTNPACK_DEVICE A pair_weight(const AttentionBackwardParams& bp, int64_t b, const Row& row, int64_t key, A product,
                              A grad_product, bool keep_scores) {
  const AttentionParams& p = bp.forward;
  A slope = 1;
  const A score = finish_score(p, b, row, key, product, &slope);
  if (score == -infinity<A>()) return A(-0.0);
  const int64_t index = (b * p.num_heads + row.head) * p.q_len + row.query;
  const A probability = std::exp(bounded_exponent(score - static_cast<const A*>(p.lse)[index]));
  const A kept = p.dropout_p > 0 ? dropout_factor<A>(p, b, row, key) : A(1);
  if (Of == Gradient::kValue) return unmarked(probability * kept);
  const A gradient = probability * (kept * grad_product - static_cast<const A*>(bp.delta)[index]);
  if (keep_scores) static_cast<A*>(bp.grad_scores)[index * p.kv_len + key] = gradient;
  return unmarked(gradient * (static_cast<A>(p.scale) * slope));
}

template <Gradient Of, class S, class A>
class BackwardBlock {
 public:
  ATTNPACK_DEVICE BackwardBlock(const AttentionBackwardParams& bp, int64_t most_group, int64_t block,
                                ExactShared<A>& shared)
      : bp_(bp), p_(bp.forward), shared_(shared) {
    const Tokens owners = owners_of(p_, Of, most_group);
    const int64_t tiles = count_tiles(p_, owners, kOwners), heads = p_.batch * p_.num_kv_heads;
    const int64_t head = block / tiles % heads;
    column_ = block / tiles / heads * kBackwardThreads + thread_id();
    chunk_ = block / tiles / heads;
    b_ = head / p_.num_kv_heads;
    kv_head_ = head % p_.num_kv_heads;
    const PackedTile tile = place_of_tile(p_, owners, kOwners, b_, block % tiles);
    first_ = tile.tile * kOwners;
    sequence_ = tile.sequence;
    keys_ = keys_of(p_, sequence_);
    rows_ = count_head_rows(p_, sequence_, kv_head_);
  }

  ATTNPACK_DEVICE void compute_gradient() {
#pragma unroll
    for (int o = 0; o < kOwners; ++o) sum_[o] = 0;
    if constexpr (Of == Gradient::kQuery)
      query_gradient();
    else
      key_gradient();
  }

 private:
  using Share = ThreadShare<kBackwardThreads>;
  ATTNPACK_DEVICE static int smaller(int64_t a, int b) { return a < b ? static_cast<int>(a) : b; }
  ATTNPACK_DEVICE KeyRows<S> rows_of_keys(const void* base, const Strides& strides, int64_t begin) const {
    return key_rows<S>(base, strides, b_, kv_head_, keys_.begin + begin);
  }

  // The owners are rows, the others are keys.
  ATTNPACK_DEVICE void query_gradient() {
    if (first_ >= rows_) return;
    const int count = smaller(rows_ - first_, kOwners);
    fill_rows(p_, sequence_, kv_head_, first_, kOwners, shared_.rows);
    const Range keys = hull(p_, sequence_, kv_head_, first_, kOwners);
    const auto queries = query_rows<S>(p_.query, p_.query_strides, b_, shared_.rows);
    const auto grads = query_rows<S>(bp_.grad_out, bp_.grad_out_strides, b_, shared_.rows);
    for (int64_t begin = keys.begin; begin < keys.end; begin += kOthers) {
      const int some = smaller(keys.end - begin, kOthers);
      const auto key = rows_of_keys(p_.key, p_.key_strides, begin);
      compute_pair_weights(queries, grads, count, key, rows_of_keys(p_.value, p_.value_strides, begin), some,
                           [&](int owner, int other) { return RowAndKey{&shared_.rows[owner], begin + other}; });
      add_weighted(shared_, key, some, column_, p_.head_dim, sum_);
    }
    const auto out = query_rows<S>(bp_.grad_query, bp_.grad_query_strides, b_, shared_.rows);
    write_gradient(out, count, p_.head_dim);
  }

  // The owners are keys, the others are rows.
  ATTNPACK_DEVICE void key_gradient() {
    const int count = smaller(keys_.count() - first_, kOwners);
    const auto keys = rows_of_keys(p_.key, p_.key_strides, first_);
    const auto values = rows_of_keys(p_.value, p_.value_strides, first_);
    for (int64_t begin = 0; begin < rows_; begin += kOthers) {
      const int some = smaller(rows_ - begin, kOthers);
      const Range seen = hull(p_, sequence_, kv_head_, begin, some);
      if (seen.end <= first_ || seen.begin >= first_ + count) continue;
      fill_rows(p_, sequence_, kv_head_, begin, kOthers, shared_.rows);
      const auto queries = query_rows<S>(p_.query, p_.query_strides, b_, shared_.rows);
      const auto grads = query_rows<S>(bp_.grad_out, bp_.grad_out_strides, b_, shared_.rows);
      compute_pair_weights(keys, values, count, queries, grads, some,
                           [&](int owner, int other) { return RowAndKey{&shared_.rows[other], first_ + owner}; });
      if constexpr (Of == Gradient::kKey)
        add_weighted(shared_, queries, some, column_, p_.head_dim, sum_);
      else
        add_weighted(shared_, grads, some, column_, p_.v_head_dim, sum_);
    }
    if constexpr (Of == Gradient::kKey)
      write_gradient(rows_of_keys(bp_.grad_key, bp_.grad_key_strides, first_), count, p_.head_dim);
    else
      write_gradient(rows_of_keys(bp_.grad_value, bp_.grad_value_strides, first_), count, p_.v_head_dim);
  }

  struct RowAndKey {
    const Row* row;
    int64_t key;
  };

  // Leaves the weights of all pairs in shared memory.
  template <class Owners, class OwnerGrads, class Others, class OtherGrads, class GetPair>
  ATTNPACK_DEVICE void compute_pair_weights(const Owners& owners, const OwnerGrads& owner_grads, int count,
                                            const Others& others, const OtherGrads& other_grads, int some,
                                            const GetPair& pair) {
    A product[Share::kOwnersPerThread], grad_product[Share::kOwnersPerThread];
    dot_products<kBackwardThreads>(shared_, owners, count, others, some, p_.head_dim, product);
#pragma unroll
    for (int i = 0; i < Share::kOwnersPerThread; ++i) grad_product[i] = 0;
    if constexpr (Of != Gradient::kValue)
      dot_products<kBackwardThreads>(shared_, owner_grads, count, other_grads, some, p_.v_head_dim, grad_product);
    sync_block();
#pragma unroll
    for (int i = 0; i < Share::kOwnersPerThread; ++i) {
      const int owner = Share::owner(i), other = Share::lane();
      A weight = A(-0.0);
      if (owner < count && other < some) {
        const RowAndKey at = pair(owner, other);
        const bool keep_scores = Of == Gradient::kQuery && chunk_ == 0 && bp_.grad_scores;
        weight = pair_weight<Of>(bp_, b_, *at.row, at.key, product[i], grad_product[i], keep_scores);
      }
      shared_.weight[owner][other] = weight;
    }
    sync_block();
  }

  template <class Out>
  ATTNPACK_DEVICE void write_gradient(const Out& out, int count, int64_t width) {
    if (column_ >= width) return;
#pragma unroll
    for (int o = 0; o < kOwners; ++o)
      if (o < count) narrow(sum_[o], const_cast<S*>(out(o)) + column_);
  }

  const AttentionBackwardParams& bp_;
  const AttentionParams& p_;
  ExactShared<A>& shared_;
  int64_t first_, column_, chunk_, b_, kv_head_, sequence_, rows_;
  Range keys_;
  A sum_[kOwners];
};

template <Gradient Of, class S, class A>
ATTNPACK_DEVICE void backward_block(const AttentionBackwardParams& bp, int64_t most_group, int64_t block,
                                    void* shared) {
  BackwardBlock<Of, S, A>(bp, most_group, block, *static_cast<ExactShared<A>*>(shared)).compute_gradient();
}

}  // namespace attnpack::cuda
