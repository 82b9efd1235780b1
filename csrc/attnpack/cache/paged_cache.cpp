#include <attnpack/cache/paged_cache.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include <attnpack/cache/detail/page_table.h>
#include <attnpack/core/padded.h>
#include <attnpack/ops/kv_cache_paged.h>

namespace attnpack {

using at::Tensor;
using c10::SymInt;

namespace {

std::vector<int64_t> read_lengths(const Tensor& lengths) {
  const Tensor read = lengths.to(at::kCPU, at::kLong).contiguous();
  return {read.const_data_ptr<int64_t>(), read.const_data_ptr<int64_t>() + read.numel()};
}

// How many of the new positions of each sequence are valid.
std::vector<int64_t> read_counts(const std::optional<Tensor>& new_lens, int64_t batch, int64_t length) {
  if (!new_lens) return std::vector<int64_t>(batch, length);
  check_new_lens(*new_lens, batch);
  auto counts = read_lengths(*new_lens);
  for (size_t b = 0; b < counts.size(); ++b) check_new_len(static_cast<int64_t>(b), counts[b], length);
  return counts;
}

// The pool as a cache of `batch` sequences, to be compared with new keys and values.
CacheTensors as_sequences(const CacheTensors& pool, int64_t batch) {
  const auto view = [&](const Tensor& x) { return x.narrow(0, 0, 1).transpose(1, 2).expand({batch, -1, -1, -1}); };
  return {view(pool.key), view(pool.value), pool.lengths};
}

Tensor all_rows(int64_t batch) { return at::arange(batch, at::kLong); }

}  // namespace

PagedCache::PagedCache(const PagedCacheOptions& o) {
  ATTNPACK_CHECK(o.batch() >= 0, "batch: got ", o.batch(), ", want 0 or more");
  constexpr int64_t kMost = int64_t{1} << 31;  // numbers of pages are int32
  const auto check_size = [&](const char* name, int64_t size) {
    ATTNPACK_CHECK(size > 0 && size < kMost, name, ": got ", size, ", want 1 to ", kMost - 1);
  };
  check_size("num_kv_heads", o.num_kv_heads());
  check_size("head_dim", o.head_dim());
  check_size("page_size", o.page_size());
  check_size("num_pages", o.num_pages());
  const int64_t v_head_dim = o.v_head_dim().value_or(o.head_dim());
  check_size("v_head_dim", v_head_dim);
  const auto dtype = c10::typeMetaToScalarType(o.tensor().dtype());
  ATTNPACK_CHECK(at::isFloatingType(dtype), "dtype: got ", dtype, ", want a floating one, that of the module");
  ATTNPACK_CHECK(!o.tensor().device().is_meta(), "device: got meta, where lengths hold no numbers, want a device with ",
                 "memory: each append reads them to find its pages");
  const auto pool = [&](int64_t width) {
    return cache_zeros({o.num_pages(), o.page_size(), o.num_kv_heads(), width}, o.tensor());
  };
  tensors_.key = pool(o.head_dim());
  tensors_.value = pool(v_head_dim);
  tensors_.lengths = cache_zeros({o.batch()}, o.tensor().dtype(at::kLong));
  const PageTable table = make_page_table(o.batch(), o.num_pages(), o.page_size());
  tensors_.block_table = table.block_table;
  references_ = table.references;
}

namespace {

PageTable table_of(const CacheTensors& tensors, const Tensor& references) {
  return {*tensors.block_table, references, tensors.key.size(1)};
}

}  // namespace

std::vector<int64_t> PagedCache::lengths_on_cpu() const {
  auto lengths = read_lengths(tensors_.lengths);
  for (size_t b = 0; b < lengths.size(); ++b) check_length(static_cast<int64_t>(b), lengths[b], *capacity());
  return lengths;
}

CacheTensors PagedCache::reserve(const Tensor& key, const Tensor& value) {
  return reserve_valid(key, value, std::nullopt);
}

CacheTensors PagedCache::reserve_valid(const Tensor& key, const Tensor& value, const std::optional<Tensor>& new_lens) {
  const int64_t batch = tensors_.lengths.size(0);
  check_fits(as_sequences(tensors_, batch), key, value);
  const auto lengths = lengths_on_cpu(), counts = read_counts(new_lens, batch, key.size(2));
  const PageTable table = table_of(tensors_, references_);
  std::vector<PageCopy> copies;
  if (writes_shared_page(table, lengths, counts)) {
    PageTable room;
    std::tie(room, copies) = copy_with_room(table, lengths, counts);
    tensors_.block_table = room.block_table;
  } else {
    give_room(table, lengths, counts);
  }
  at::NoGradGuard no_grad;
  copy_pages(tensors_.key, copies);
  copy_pages(tensors_.value, copies);
  return tensors_;
}

CacheTensors PagedCache::reserve_latents(const Tensor& latents, int64_t) {
  ATTNPACK_CHECK(false, "cache: got a PagedCache, want a LatentCache or StaticCache for latents of shape ",
                 latents.sym_sizes(), "; pages hold the keys and values of heads");
}

// The op has counted the positions already. Pages for those that are not valid may be left.
void PagedCache::commit(const SymInt&, const std::optional<Tensor>& new_lens) {
  if (new_lens) give_back();
}

void PagedCache::give_back() { keep_pages(table_of(tensors_, references_), lengths_on_cpu()); }

std::shared_ptr<PagedCache> PagedCache::fork(const Tensor& index) const {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  c10::InferenceMode normal(false);
  const PageTable table = fork_pages(table_of(tensors_, references_), rows.cpu());
  auto forked = tensors_;
  forked.lengths = tensors_.lengths.index_select(0, rows);
  forked.block_table = table.block_table;
  return std::make_shared<PagedCache>(std::move(forked), references_);
}

void PagedCache::keep(const std::vector<int64_t>& kept) {
  c10::InferenceMode normal(false);
  const PageTable table = fork_pages(table_of(tensors_, references_), all_rows(lengths().size(0)));
  keep_pages(table, kept);
  tensors_.block_table = table.block_table;
  tensors_.lengths = at::tensor(kept, at::kLong).to(lengths().device());
}

void PagedCache::release(const Tensor& rows) {
  const Tensor checked = check_index(rows, lengths(), /*same_batch=*/false, "rows");
  auto kept = lengths_on_cpu();
  for (const int64_t b : read_lengths(checked)) kept[b] = 0;
  keep(kept);
}

void PagedCache::reset() { keep(std::vector<int64_t>(lengths().size(0))); }

void PagedCache::crop(const SymInt& n) {
  check_crop(n);
  auto kept = lengths_on_cpu();
  for (int64_t& length : kept) length = std::min(length, n.guard_int(__FILE__, __LINE__));
  keep(kept);
}

void PagedCache::reorder(const Tensor& index) { restore(fork(index)->state()); }

std::shared_ptr<KVCache> PagedCache::clone() const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const PageTable table = clone_table(table_of(tensors_, references_));
  auto copy = tensors_;
  for (auto* tensor : {&copy.lengths, &copy.key, &copy.value}) *tensor = tensor->clone();
  copy.block_table = table.block_table;
  return std::make_shared<PagedCache>(std::move(copy), table.references);
}

int64_t PagedCache::free_pages() const { return attnpack::free_pages(table_of(tensors_, references_)); }

Tensor PagedCache::k() const { return gather_pages(tensors_.key, block_table(), lengths(), sym_len()); }

Tensor PagedCache::v() const { return gather_pages(tensors_.value, block_table(), lengths(), sym_len()); }

SymInt PagedCache::sym_len() const { return longest_length(lengths(), *capacity()); }

SymInt PagedCache::sym_nbytes() const {
  const auto row = [](const Tensor& pool) { return pool.size(2) * pool.size(3) * pool.element_size(); };
  return used_rows(table_of(tensors_, references_), lengths_on_cpu()) * (row(tensors_.key) + row(tensors_.value));
}

// The table is read without a look at its numbers.
void PagedCache::check_state() const {
  const_cast<PagedCache*>(this)->visit_tensors([](const char* name, const Tensor& part) {
    ATTNPACK_CHECK(part.defined() && !part.is_nested() && part.layout() == at::kStrided, "tensors: got ", name,
                   part.defined() ? " as a tensor that is nested or sparse" : " of a PagedCache as none",
                   ", want a plain tensor");
  });
  const Tensor &lengths = tensors_.lengths, &key = tensors_.key, &value = tensors_.value;
  const Tensor &table = block_table(), &references = references_;
  ATTNPACK_CHECK(lengths.dim() == 1 && lengths.scalar_type() == at::kLong && key.dim() == 4 && value.dim() == 4 &&
                     key.sizes().slice(0, 3) == value.sizes().slice(0, 3) && key.size(1) > 0,
                 "tensors: got lengths ", lengths.sizes(), ", key pool ", key.sizes(), " and value pool ",
                 value.sizes(), ", want int64 [batch] and [num_pages, page_size, num_kv_heads, head_dim] each");
  const auto plain = [](const Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kInt && x.is_contiguous(); };
  ATTNPACK_CHECK(plain(table) && plain(references) && table.dim() == 2 && table.size(0) == lengths.size(0) &&
                     references.dim() == 1 && references.size(0) == key.size(0),
                 "tensors: got block_table ", table.sizes(), " and references ", references.sizes(),
                 ", want int32 [batch, max_pages] and [num_pages] on the CPU, contiguous");
  if (at::isTensorSubclassLike(table) || table.is_meta()) return;
  const auto* pages = table.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < table.numel(); ++i)
    ATTNPACK_CHECK(pages[i] >= -1 && pages[i] < key.size(0), "tensors: block_table has page ", pages[i],
                   ", wants -1 to ", key.size(0) - 1);
}

void PagedCache::take_back(const CacheBefore& before) {
  KVCache::take_back(before);
  give_back();
}

}  // namespace attnpack
