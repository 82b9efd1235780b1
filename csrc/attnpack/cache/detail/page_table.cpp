#include <attnpack/cache/detail/page_table.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include <attnpack/core/check.h>

namespace attnpack {
namespace {

using at::Tensor;

int64_t pages_for(int64_t positions, int64_t page_size) { return (positions + page_size - 1) / page_size; }

// Caches on one pool may end or append in several threads.
std::mutex& pages_mutex() {
  static std::mutex mutex;
  return mutex;
}

int32_t* row_of(const PageTable& table, int64_t b) {
  return table.block_table.mutable_data_ptr<int32_t>() + b * table.block_table.size(1);
}

// Hands out free pages. It counts those that it has handed out, but changes no counts of references.
class FreePages {
 public:
  explicit FreePages(const Tensor& references)
      : references_(references.const_data_ptr<int32_t>()), count_(references.numel()), taken_(count_, false) {}

  // The page after `last`, or the first free one; -1 if there is none.
  int64_t take(int64_t last) {
    if (last >= 0 && is_free(last + 1)) return taken(last + 1);
    while (first_ < count_ && !is_free(first_)) ++first_;
    return first_ < count_ ? taken(first_) : -1;
  }

 private:
  bool is_free(int64_t page) const { return page < count_ && references_[page] == 0 && !taken_[page]; }
  int64_t taken(int64_t page) {
    taken_[page] = true;
    return page;
  }
  const int32_t* references_;
  int64_t count_, first_ = 0;
  std::vector<bool> taken_;
};

// Entry `entry` of row b becomes `page`.
struct Entry {
  int64_t b, entry, page;
};

// Counts each page of a table once more.
void count_pages(const PageTable& table) {
  int32_t* references = table.references.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < table.block_table.size(0); ++b) {
    const int32_t* row = row_of(table, b);
    for (int64_t i = 0; i < table.block_table.size(1) && row[i] >= 0; ++i) ++references[row[i]];
  }
}

// The same table over memory that gives the pages back when it ends.
PageTable owning(const PageTable& table) {
  const auto give_back = [table](void*) { keep_pages(table, std::vector<int64_t>(table.block_table.size(0))); };
  return {at::from_blob(table.block_table.mutable_data_ptr(), table.block_table.sizes(), give_back, at::kInt),
          table.references, table.page_size};
}

// The last page of a sequence, where that page has free rows and the sequence is to write to it; else -1.
int64_t written_page(const PageTable& table, const std::vector<int64_t>& lengths, const std::vector<int64_t>& counts,
                     int64_t b) {
  return counts[b] > 0 && lengths[b] % table.page_size != 0 ? row_of(table, b)[lengths[b] / table.page_size] : -1;
}

// The sequence that keeps a page which only sequences that are to write hold: the longest, so that it writes after the
// rows that the others hold.
struct Writers {
  int32_t count = 0;
  int64_t longest = -1;
};

std::unordered_map<int64_t, Writers> writers_of_pages(const PageTable& table, const std::vector<int64_t>& lengths,
                                                      const std::vector<int64_t>& counts) {
  std::unordered_map<int64_t, Writers> result;
  for (int64_t b = 0; b < static_cast<int64_t>(lengths.size()); ++b) {
    const int64_t page = written_page(table, lengths, counts, b);
    if (page < 0) continue;
    Writers& writers = result[page];
    ++writers.count;
    if (writers.longest < 0 || lengths[b] > lengths[writers.longest]) writers.longest = b;
  }
  return result;
}

std::vector<PageCopy> add_pages(const PageTable& table, const std::vector<int64_t>& lengths,
                                const std::vector<int64_t>& counts) {
  const int64_t size = table.page_size, most = table.block_table.size(1);
  int32_t* references = table.references.mutable_data_ptr<int32_t>();
  const auto writers = writers_of_pages(table, lengths, counts);
  FreePages free(table.references);
  std::vector<PageCopy> copies;
  std::vector<Entry> entries;
  int64_t missing = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(lengths.size()); ++b) {
    if (counts[b] == 0) continue;
    ATTNPACK_CHECK(pages_for(lengths[b] + counts[b], size) <= most, "sequence ", b, " holds ", lengths[b],
                   " positions and ", counts[b], " are to be appended, wants at most ", most * size,
                   ": make the cache with more pages");
    int64_t last = lengths[b] > 0 ? row_of(table, b)[pages_for(lengths[b], size) - 1] : -1;
    const auto take = [&](int64_t entry) {
      const int64_t page = free.take(last);
      missing += page < 0;
      entries.push_back({b, entry, page});
      last = page;
    };
    if (const int64_t page = written_page(table, lengths, counts, b); page >= 0) {
      const Writers& all = writers.at(page);
      if (references[page] > all.count || all.longest != b) {
        take(lengths[b] / size);
        copies.push_back({page, last, lengths[b] % size});
      }
    }
    for (int64_t i = pages_for(lengths[b], size); i < pages_for(lengths[b] + counts[b], size); ++i) take(i);
  }
  ATTNPACK_CHECK(missing == 0, "the pool is full: ", entries.size(), " pages are needed and ",
                 static_cast<int64_t>(entries.size()) - missing, " of ", table.references.numel(),
                 " are free: release() sequences, or make the cache with more pages");
  for (const PageCopy& copy : copies) --references[copy.from];
  for (const Entry& e : entries) {
    row_of(table, e.b)[e.entry] = static_cast<int32_t>(e.page);
    ++references[e.page];
  }
  return copies;
}

}  // namespace

PageTable make_page_table(int64_t batch, int64_t num_pages, int64_t page_size) {
  ATTNPACK_CHECK(batch >= 0 && num_pages >= 0, "batch is ", batch, " and num_pages ", num_pages,
                 ", wants numbers >= 0");
  ATTNPACK_CHECK(page_size >= 1, "page_size is ", page_size, ", wants at least 1");
  return owning({at::full({batch, num_pages}, -1, at::kInt), at::zeros({num_pages}, at::kInt), page_size});
}

int64_t free_pages(const PageTable& table) {
  const int32_t* references = table.references.const_data_ptr<int32_t>();
  int64_t count = 0;
  for (int64_t i = 0; i < table.references.numel(); ++i) count += references[i] == 0;
  return count;
}

std::vector<PageCopy> give_room(const PageTable& table, const std::vector<int64_t>& lengths,
                                const std::vector<int64_t>& counts) {
  const std::lock_guard lock(pages_mutex());
  return add_pages(table, lengths, counts);
}

bool writes_shared_page(const PageTable& table, const std::vector<int64_t>& lengths,
                        const std::vector<int64_t>& counts) {
  const std::lock_guard lock(pages_mutex());
  const int32_t* references = table.references.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < static_cast<int64_t>(lengths.size()); ++b) {
    const int64_t page = written_page(table, lengths, counts, b);
    if (page >= 0 && references[page] > 1) return true;
  }
  return false;
}

std::pair<PageTable, std::vector<PageCopy>> copy_with_room(const PageTable& table, const std::vector<int64_t>& lengths,
                                                           const std::vector<int64_t>& counts) {
  const PageTable copy{table.block_table.clone(), table.references, table.page_size};
  const std::lock_guard lock(pages_mutex());
  auto copies = add_pages(copy, lengths, counts);
  count_pages(table);
  return {owning(copy), std::move(copies)};
}

void keep_pages(const PageTable& table, const std::vector<int64_t>& lengths) {
  const std::lock_guard lock(pages_mutex());
  int32_t* references = table.references.mutable_data_ptr<int32_t>();
  for (size_t b = 0; b < lengths.size(); ++b) {
    int32_t* row = row_of(table, static_cast<int64_t>(b));
    for (int64_t i = pages_for(lengths[b], table.page_size); i < table.block_table.size(1) && row[i] >= 0; ++i) {
      --references[row[i]];
      row[i] = -1;
    }
  }
}

PageTable fork_pages(const PageTable& table, const Tensor& index) {
  const PageTable fork{table.block_table.index_select(0, index), table.references, table.page_size};
  const std::lock_guard lock(pages_mutex());
  count_pages(fork);
  return owning(fork);
}

PageTable clone_table(const PageTable& table) {
  const PageTable clone{table.block_table.clone(), at::zeros_like(table.references), table.page_size};
  count_pages(clone);
  return owning(clone);
}

int64_t used_rows(const PageTable& table, const std::vector<int64_t>& lengths) {
  std::vector<int64_t> rows(table.references.numel());
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int32_t* row = row_of(table, static_cast<int64_t>(b));
    for (int64_t i = 0; i < pages_for(lengths[b], table.page_size); ++i)
      rows[row[i]] = std::max(rows[row[i]], std::min(table.page_size, lengths[b] - i * table.page_size));
  }
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

void copy_pages(const Tensor& pool, const std::vector<PageCopy>& copies) {
  for (const PageCopy& copy : copies)
    pool.select(0, copy.to).narrow(0, 0, copy.rows).copy_(pool.select(0, copy.from).narrow(0, 0, copy.rows));
}

}  // namespace attnpack
