#pragma once

#include <cmath>
#include <cstring>
#include <memory>

#include "cuda_problem.h"

// Packed sequences: a drawn problem for each, and one call of the kernels for all of them.
namespace attnpack::cuda {

struct Lengths {
  int64_t queries, keys;
};
// Where a sequence's query row 0 stands: at its keys less its queries, at one number for all, or at its own number.
enum class Offset { kAtEnd, kNumber, kEach };

template <class S>
struct PackedProblem {
  using A = typename Accumulation<S>::type;

  std::vector<std::unique_ptr<Problem<S>>> sequences;
  std::vector<int64_t> query_ends{0}, key_ends{0}, offsets, lens;
  std::vector<int32_t> table;
  Tensor4<S> query, key, value, out, grad_out, grad_query, grad_key, grad_value;
  std::vector<A> lse, delta;
  AttentionBackwardParams bp{};
  AttentionParams& p = bp.forward;
  int64_t most_group = 0;

  // shape: that of each, but for the lengths.
  PackedProblem(const std::vector<Lengths>& lengths, Shape shape, const Settings& on, Offset offset, int seed) {
    Settings plain = on;
    plain.poison = false;  // the positions come later
    for (const Lengths& each : lengths) {
      shape.q_len = each.queries;
      shape.kv_len = each.keys;
      auto& x = *sequences.emplace_back(std::make_unique<Problem<S>>(shape, plain, seed + 1000 * sequences.size()));
      x.on.poison = on.poison;
      x.p.q_offset = offset == Offset::kAtEnd    ? each.keys - each.queries
                     : offset == Offset::kNumber ? 20
                                                 : 37 * static_cast<int64_t>(sequences.size()) % 50 - 10;
      if (on.window) x.p.window_left = 40;
      if (on.poison) x.poison();
      offsets.push_back(x.p.q_offset);
      query_ends.push_back(query_ends.back() + each.queries);
      key_ends.push_back(key_ends.back() + each.keys);
    }
    const Problem<S>& first = *sequences[0];
    const int64_t heads = first.num_heads, queries = query_ends.back(), keys = key_ends.back();
    query = Tensor4<S>(1, heads, queries, shape.head_dim);
    key = Tensor4<S>(1, shape.num_kv_heads, keys, shape.head_dim);
    value = Tensor4<S>(1, shape.num_kv_heads, keys, shape.v_head_dim);
    grad_out = Tensor4<S>(1, heads, queries, shape.v_head_dim);
    out = Tensor4<S>(1, heads, queries, shape.v_head_dim);
    grad_query = Tensor4<S>(1, heads, queries, shape.head_dim);
    grad_key = Tensor4<S>(1, shape.num_kv_heads, keys, shape.head_dim);
    grad_value = Tensor4<S>(1, shape.num_kv_heads, keys, shape.v_head_dim);
    lse.assign(heads * queries, A(-7));
    delta.assign(heads * queries, A(0));
    copy_rows();
    most_group = first.most_group;

    bp = first.bp;
    p.q_len = queries;
    p.kv_len = keys;
    p.sequences = static_cast<int64_t>(lengths.size());
    p.query_ends = query_ends.data();
    p.key_ends = key_ends.data();
    for (const Lengths& each : lengths) {
      p.likely_queries = std::max(p.likely_queries, each.queries);
      p.likely_keys = std::max(p.likely_keys, each.keys);
    }
    p.at_end = offset == Offset::kAtEnd;
    if (offset == Offset::kEach) p.q_offsets = offsets.data();
    p.query = query.data();
    p.key = key.data();
    p.value = on.latent ? key.data() : value.data();
    p.out = out.data();
    p.lse = lse.data();
    p.query_strides = query.strides;
    p.key_strides = key.strides;
    p.value_strides = on.latent ? key.strides : value.strides;
    p.out_strides = out.strides;
    use_gradients(bp, grad_out, grad_query, grad_key, grad_value);
    bp.delta = delta.data();
    drop_unused_strides(bp.forward);
    drop_unused_strides(bp);
  }

  // Copies the sequences' tensors to their places.
  void copy_rows() {
    for (size_t b = 0; b < sequences.size(); ++b) {
      Problem<S>& x = *sequences[b];
      each_row(query, x.query, query_ends[b]);
      each_row(grad_out, x.grad_out, query_ends[b]);
      each_row(key, x.key, key_ends[b]);
      each_row(value, x.value, key_ends[b]);
    }
  }
  static void each_row(Tensor4<S>& to, Tensor4<S>& from, int64_t first) {
    for (int64_t h = 0; h < from.heads; ++h)
      for (int64_t i = 0; i < from.length; ++i)
        for (int64_t d = 0; d < from.width; ++d) to.at(0, h, first + i, d) = from.at(0, h, i, d);
  }

  // NaN in all numbers of one sequence. Nothing of it may reach another.
  void break_sequence(size_t b) {
    Problem<S>& x = *sequences[b];
    S nan;
    narrow(std::numeric_limits<A>::quiet_NaN(), &nan);
    for (Tensor4<S>* each : {&x.query, &x.key, &x.value, &x.grad_out})
      std::fill(each->data(), each->data() + each->heads * each->length * each->width, nan);
    copy_rows();
  }

  // NaN and Inf in a query and two gradients of outputs of one sequence. The rows see keys.
  void break_rows(size_t b) {
    Problem<S>& x = *sequences[b];
    const int64_t last = x.shape.q_len - 1;
    narrow(std::numeric_limits<A>::quiet_NaN(), &x.query.at(0, 0, last - 2, 3));
    narrow(infinity<A>(), &x.grad_out.at(0, 0, last - 1, 2));
    narrow(infinity<A>(), &x.grad_out.at(0, x.num_heads - 1, last - 9, 4));
    copy_rows();
  }

  // Moves the keys into pages that lie in no order. Whatever no sequence has is NaN, and what follows a sequence's
  // pages in the table names no page.
  void use_pages(int64_t page_size) {
    int64_t pages = 2, most = 1;  // two that nobody has
    for (const auto& x : sequences) {
      const int64_t of_sequence = (x->shape.kv_len + page_size - 1) / page_size;
      pages += of_sequence;
      most = std::max(most, of_sequence + 1);
    }
    std::vector<int32_t> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), sequences[0]->random);
    table.assign(most * sequences.size(), -5);
    S nan;
    narrow(std::numeric_limits<A>::quiet_NaN(), &nan);
    size_t taken = 0;
    const auto place = [&](Tensor4<S>& pool, Tensor4<S> Problem<S>::* of) {
      const int64_t heads = pool.heads, width = pool.width;
      pool = Tensor4<S>(pages, heads, page_size, width);
      std::fill(pool.data(), pool.data() + pages * heads * page_size * width, nan);
      for (size_t b = 0; b < sequences.size(); ++b) {
        Tensor4<S>& from = (*sequences[b]).*of;
        for (int64_t j = 0; j < from.length; ++j)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t d = 0; d < width; ++d)
              pool.at(table[b * most + j / page_size], h, j % page_size, d) = from.at(0, h, j, d);
      }
    };
    for (size_t b = 0; b < sequences.size(); ++b) {
      const int64_t keys = sequences[b]->shape.kv_len;
      lens.push_back(keys);
      for (int64_t i = 0; i * page_size < keys; ++i) table[b * most + i] = order[taken++];
    }
    place(key, &Problem<S>::key);
    place(value, &Problem<S>::value);
    p.key = key.data();
    p.value = value.data();
    p.key_strides = key.strides;
    p.value_strides = value.strides;
    p.key_ends = nullptr;
    p.kv_lens = lens.data();
    p.kv_len = most * page_size;
    p.block_table = table.data();
    p.table_stride = most;
    p.page_size = page_size;
    p.num_pages = pages;
  }
};

// The settings and the lengths of the tests that draw none. last_keys: of the last sequence.
inline std::vector<Settings> packed_grid() {
  return {{},
          {.causal = true},
          {.causal = true, .window = true, .sinks = true},
          {.window = true, .softcap = true, .alibi = true},
          {.causal = true, .map = true},
          {.causal = true, .poison = true}};
}
inline std::vector<Lengths> ragged_lengths(int64_t last_keys) {
  return {{70, 130}, {0, 40}, {3, 0}, {1, 64}, {65, 65}, {0, 0}, {40, last_keys}};
}

// The rows of one sequence.
template <class S>
Tensor4<S> rows_of(Tensor4<S>& packed, int64_t first, int64_t count) {
  Tensor4<S> rows(1, packed.heads, count, packed.width);
  for (int64_t h = 0; h < packed.heads; ++h)
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < packed.width; ++d) rows.at(0, h, i, d) = packed.at(0, h, first + i, d);
  return rows;
}

// How many numbers differ by any bit, of those that are finite in a.
template <class S>
int64_t different_bits(const S* a, const S* b, int64_t count) {
  int64_t different = 0;
  for (int64_t i = 0; i < count; ++i)
    different += std::isfinite(widen(a[i])) && std::memcmp(a + i, b + i, sizeof(S)) != 0;
  return different;
}

template <class S>
int64_t different_bits(Tensor4<S>& a, Tensor4<S>& b) {
  return different_bits(a.data(), b.data(), a.heads * a.length * a.width);
}

// Sequences that end and begin in the middle of tiles and of steps, some of them without queries or keys.
inline std::vector<Lengths> draw_lengths(std::mt19937& random, bool even) {
  std::vector<Lengths> lengths(draw(random, 1, 6));
  for (Lengths& each : lengths) {
    const auto length = [&](int64_t most) { return draw(random, 0, 5) == 0 ? 0 : draw(random, 1, most); };
    each = {length(draw(random, 0, 1) ? 6 : 90), length(draw(random, 0, 1) ? 60 : 300)};
    if (even) each.keys = each.queries;
  }
  return lengths;
}

}  // namespace attnpack::cuda
