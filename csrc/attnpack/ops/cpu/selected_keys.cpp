#include <attnpack/ops/cpu/selected_keys.h>

#include <ATen/ATen.h>

#include <atomic>

#include <attnpack/core/check.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/loop_threads.h>
#include <attnpack/ops/cpu/name_lists.h>

namespace attnpack {
namespace {

// The most calls that run together. Their params take half a MiB.
constexpr int64_t kMostCalls = 1024;
// The most bytes of gradients of keys and values that wait to be added up, unless one row has more.
constexpr int64_t kWaitingBytes = 4 << 20;
// Into how many parts the keys of a kv head are cut where gradients are added up.
constexpr int64_t kAddedParts = 16;

// x [batch, num_heads, q_len] as [batch, q_len, num_heads].
Tensor by_rows(const Tensor& x) { return x.transpose(1, 2).contiguous(); }

}  // namespace

SelectedCalls::SelectedCalls(const AttentionParams& all, const AttentionArguments& args, int64_t element_size)
    : all_(all),
      key_block_(args.key_block),
      index_heads_(args.key_index->size(1)),
      names_(args.key_index->size(3)),
      element_size_(element_size),
      mask_size_(bytes_of(all.mask_dtype)) {
  const int64_t blocks = count_blocks(all.kv_len, key_block_), rows = all.batch * index_heads_ * all.q_len;
  ATTNPACK_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "key has ", blocks, " blocks of ", key_block_,
                 " keys, wants at most ", std::numeric_limits<int32_t>::max(), " with key_index: raise key_block");
  const Tensor index = args.key_index->contiguous();
  lists_ = at::empty(index.sizes(), index.options().dtype(at::kInt));
  counts_.resize(rows);
  std::atomic<bool> in_range = true;
  const auto sort_row = [&](int64_t row, void* scratch) {
    int32_t* const list = lists_.data_ptr<int32_t>() + row * names_;
    const auto sort = [&](const auto* names) {
      return sort_names(names + row * names_, names_, blocks, list, scratch);
    };
    const int64_t count =
        index.scalar_type() == at::kInt ? sort(index.const_data_ptr<int32_t>()) : sort(index.const_data_ptr<int64_t>());
    counts_[row] = static_cast<int32_t>(std::max<int64_t>(count, 0));
    if (count < 0) in_range = false;
  };
  constexpr double kWorkOfName = 16;  // in multiply-adds
  if (names_ > 0)
    for_each_unit(rows, kWorkOfName * static_cast<double>(rows * names_), sorting_scratch(names_, blocks), sort_row);
  if (!in_range) check_key_index_values(index, key_block_, all.kv_len);
  group_start_.resize(2 * all.num_kv_heads);
  for (int64_t g = 0; g < all.num_kv_heads; ++g) {
    group_start_[2 * g + 1] = group_size(all, g);
    for (int64_t member = 0; member < group_size(all, g); ++member) group_heads_.push_back(group_head(all, g, member));
  }
}

SelectedCalls::Row SelectedCalls::row(int64_t index) const {
  const int64_t head = index / all_.q_len, b = head / all_.num_kv_heads, query = index % all_.q_len;
  return {b, head % all_.num_kv_heads, query, (b * all_.q_len + query) * all_.num_heads};
}

AttentionParams SelectedCalls::call(const Row& row, void* lse) const {
  const auto& [b, kv_head, query, place] = row;
  const int64_t list_row = (b * index_heads_ + (index_heads_ > 1 ? kv_head : 0)) * all_.q_len + query;
  const int32_t *list = lists_.const_data_ptr<int32_t>() + list_row * names_, *end = list + counts_[list_row];
  const Range keys = key_range(all_, b, query);
  // The blocks that hold a key of the range.
  list = std::lower_bound(list, end, keys.begin / key_block_);
  end = keys.empty() ? list : std::lower_bound(list, end, count_blocks(keys.end, key_block_));
  AttentionParams p = all_;
  p.selected = {.given = true,
                .num_kv_heads = all_.num_kv_heads,
                .first_score = (b * all_.num_heads * all_.q_len + query) * all_.kv_len,
                .scores_of_head = all_.q_len * all_.kv_len};
  p.batch = p.num_kv_heads = p.q_len = 1;
  p.kv_len = 0;
  if (list < end) {
    p.selected.skipped = std::max<int64_t>(keys.begin - *list * key_block_, 0);
    const int64_t left_out = std::max<int64_t>((end[-1] + int64_t{1}) * key_block_ - keys.end, 0);
    p.kv_len = (end - list) * key_block_ - p.selected.skipped - left_out;
  }
  p.block_table = list;
  p.page_size = key_block_;
  const auto at_row = [&](auto* base, const Strides& s) {
    return moved(base, row.b * s.batch + row.query * s.row, element_size_);
  };
  const auto at_head = [&](auto* base, const Strides& s) {
    return moved(base, row.b * s.batch + row.kv_head * s.head, element_size_);
  };
  p.query = at_row(all_.query, all_.query_strides);
  p.out = at_row(all_.out, all_.out_strides);
  p.key = at_head(all_.key, all_.key_strides);
  p.value = at_head(all_.value, all_.value_strides);
  p.key_strides.batch = key_block_ * all_.key_strides.row;
  p.value_strides.batch = key_block_ * all_.value_strides.row;
  p.lse = moved(lse, place, all_.dtype == DType::kFloat64 ? 8 : 4);
  p.group_start = group_start_.data() + 2 * kv_head;
  p.group_heads =
      group_heads_.data() + (all_.group_start ? all_.group_start[kv_head] : kv_head * group_size(all_, kv_head));
  p.mask = moved(all_.mask, b * all_.mask_strides.batch + query * all_.mask_strides.row, mask_size_);
  drop_ranges(p);
  p.q_offsets = nullptr;
  p.q_offset = first_position(all_, b) + query;
  return p;
}

AttentionResult attend_selected_keys(PreparedAttention& prepared, const Tensor& query, const AttentionArguments& args) {
  const AttentionResult result = make_outputs(prepared, query);
  const Tensor& lse = std::get<1>(result);
  const AttentionParams& all = prepared.params;
  const Tensor rows = all.q_len == 1 ? lse : at::empty({all.batch, all.q_len, all.num_heads}, lse.options());
  const SelectedCalls selected(all, args, query.element_size());
  std::vector<AttentionParams> calls;
  for (int64_t i = 0; i < selected.count();) {
    calls.clear();
    for (; i < selected.count() && static_cast<int64_t>(calls.size()) < kMostCalls; ++i)
      calls.push_back(selected.call(selected.row(i), rows.mutable_data_ptr()));
    run_forward(kernels_in_use(), calls, kLoopThreads);
  }
  if (all.q_len != 1) lse.copy_(rows.transpose(1, 2));
  return result;
}

namespace {

// Rows whose gradients of keys and values wait to be added up. The numbers stay where they are for the next rows.
struct WaitingRows {
  struct Waiting {
    SelectedCalls::Row row;
    int64_t first_key;
  };
  std::vector<Waiting> rows;
  std::vector<AttentionBackwardParams> calls;
  Tensor grad_key, grad_value, sums, done;  // [keys, width], and what units share
  int64_t keys = 0, query_rows = 0, tiles = 0;
};

// A tensor of at least `size` numbers.
void make_room(Tensor& x, int64_t size, const at::TensorOptions& options) {
  if (!x.defined() || x.numel() < size) x = at::empty({size}, options);
}

// to[number of a key] += from[key] for the keys of a call whose block is in the part.
template <class A>
void add_key_gradients(const AttentionParams& p, Range part, int64_t width, const A* from, A* to) {
  const int64_t last_row = p.selected.skipped + p.kv_len;
  const int32_t* const end = p.block_table + count_blocks(last_row, p.page_size);
  const int32_t* block = std::lower_bound(p.block_table, end, part.begin);
  for (; block < end && *block < part.end; ++block) {
    const int64_t first = (block - p.block_table) * p.page_size, begin = std::max(first, p.selected.skipped);
    const int64_t rows = std::min(first + p.page_size, last_row) - begin;
    const A* x = from + (begin - p.selected.skipped) * width;
    A* sum = to + (*block * p.page_size + begin - first) * width;
    for (int64_t i = 0; i < rows * width; ++i) sum[i] += x[i];
  }
}

}  // namespace

void differentiate_selected_keys(PreparedBackward& prepared, const Tensor& query, const AttentionArguments& args) {
  AttentionBackwardParams& bp = prepared.params;
  const AttentionParams& all = bp.forward;
  const auto options = prepared.delta.options();
  const int64_t size = prepared.delta.element_size(), width = all.head_dim + all.v_head_dim;
  const Tensor lse = by_rows(prepared.lse), delta = by_rows(prepared.delta);
  const Tensor grad_lse = prepared.grad_lse.defined() ? by_rows(prepared.grad_lse) : Tensor();
  const SelectedCalls selected(all, args, query.element_size());
  // The rows add to these one after the other, so that each sum has one order.
  const Tensor grad_key = at::zeros({all.batch, all.num_kv_heads, all.kv_len, all.head_dim}, options);
  const Tensor grad_value = at::zeros({all.batch, all.num_kv_heads, all.kv_len, all.v_head_dim}, options);
  prepared.grad_query.zero_();  // of rows without keys
  WaitingRows waiting;
  const auto add_row = [&](const SelectedCalls::Row& row) {
    AttentionBackwardParams& call = waiting.calls.emplace_back(bp);
    call.forward = selected.call(row, lse.data_ptr());
    const auto at_row = [&](auto* base, const Strides& s) {
      return moved(base, row.b * s.batch + row.query * s.row, query.element_size());
    };
    call.grad_out = at_row(bp.grad_out, bp.grad_out_strides);
    call.grad_query = at_row(bp.grad_query, bp.grad_query_strides);
    call.delta = moved(delta.const_data_ptr(), row.place, size);
    if (grad_lse.defined()) call.grad_lse = moved(grad_lse.const_data_ptr(), row.place, size);
    call.wide_key_gradients = true;
    call.grad_key_strides = {.row = all.head_dim};
    call.grad_value_strides = {.row = all.v_head_dim};
    call.tiles = tile_rows(call.forward).tiles;
    waiting.rows.push_back({row, waiting.keys});
    waiting.keys += call.forward.kv_len;
    waiting.query_rows += tile_rows(call.forward).rows;
    waiting.tiles += call.tiles;
  };
  const auto run_rows = [&] {
    const int64_t sum_width = sums_width(all.head_dim);
    make_room(waiting.grad_key, waiting.keys * all.head_dim, options);
    make_room(waiting.grad_value, waiting.keys * all.v_head_dim, options);
    make_room(waiting.sums, waiting.query_rows * sum_width, options);
    waiting.done = at::zeros({waiting.tiles}, at::kInt);
    int64_t query_rows = 0, tiles = 0;
    for (size_t i = 0; i < waiting.calls.size(); ++i) {
      AttentionBackwardParams& call = waiting.calls[i];
      call.grad_key = moved(waiting.grad_key.data_ptr(), waiting.rows[i].first_key * all.head_dim, size);
      call.grad_value = moved(waiting.grad_value.data_ptr(), waiting.rows[i].first_key * all.v_head_dim, size);
      call.grad_query_sums = moved(waiting.sums.data_ptr(), query_rows * sum_width, size);
      call.blocks_done = waiting.done.mutable_data_ptr<int32_t>() + tiles;
      query_rows += tile_rows(call.forward).rows;
      tiles += call.tiles;
    }
    run_backward(kernels_in_use(), waiting.calls, kLoopThreads);
    const int64_t blocks = count_blocks(all.kv_len, args.key_block);
    const auto add_part = [&](int64_t part, void*) {
      const Range range{blocks * part / kAddedParts, blocks * (part + 1) / kAddedParts};
      for (size_t i = 0; i < waiting.calls.size(); ++i) {
        const SelectedCalls::Row& row = waiting.rows[i].row;
        const int64_t first = (row.b * all.num_kv_heads + row.kv_head) * all.kv_len;
        const auto add = [&](const void* from, const Tensor& to, int64_t columns) {
          if (size == sizeof(double))
            add_key_gradients(waiting.calls[i].forward, range, columns, static_cast<const double*>(from),
                              to.mutable_data_ptr<double>() + first * columns);
          else
            add_key_gradients(waiting.calls[i].forward, range, columns, static_cast<const float*>(from),
                              to.mutable_data_ptr<float>() + first * columns);
        };
        add(waiting.calls[i].grad_key, grad_key, all.head_dim);
        add(waiting.calls[i].grad_value, grad_value, all.v_head_dim);
      }
    };
    for_each_unit(kAddedParts, static_cast<double>(waiting.keys * width), 0, add_part);
    waiting.rows.clear();
    waiting.calls.clear();
    waiting.keys = waiting.query_rows = waiting.tiles = 0;
  };
  for (int64_t i = 0; i < selected.count(); ++i) {
    add_row(selected.row(i));
    if (static_cast<int64_t>(waiting.calls.size()) == kMostCalls || waiting.keys * width * size >= kWaitingBytes ||
        i + 1 == selected.count())
      run_rows();
  }
  prepared.grad_key.copy_(grad_key);
  prepared.grad_value.copy_(grad_value);
}

}  // namespace attnpack
