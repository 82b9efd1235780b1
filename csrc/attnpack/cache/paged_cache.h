#pragma once

#include <attnpack/cache/kv_cache.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct PagedCacheOptions : OptionList<PagedCacheOptions> {
  PagedCacheOptions(int64_t batch, int64_t num_kv_heads, int64_t head_dim, int64_t num_pages)
      : batch_(batch), num_kv_heads_(num_kv_heads), head_dim_(head_dim), num_pages_(num_pages) {}
  ATTNPACK_OPTION(int64_t, batch);
  ATTNPACK_OPTION(int64_t, num_kv_heads);
  ATTNPACK_OPTION(int64_t, head_dim);
  ATTNPACK_OPTION(int64_t, num_pages);                  // of the pool, which all sequences share
  ATTNPACK_OPTION(int64_t, page_size) = 16;             // positions of a page
  ATTNPACK_OPTION(std::optional<int64_t>, v_head_dim);  // default head_dim
  ATTNPACK_OPTION(at::TensorOptions, tensor);           // dtype and device
};

// Keys and values in pages of a pool that is allocated once (PagedAttention, Kwon et al. 2023). A sequence takes pages
// as it grows, and sequences share pages: a page that several hold is copied when one of them writes to it. Pages go
// back to the pool when no sequence holds them any more, also when a cache ends. An append to a full pool raises.
// Caches on one pool may append in several threads, one thread for each cache; two threads that append to one
// PagedCache lose positions without an error.
class PagedCache : public KVCache {
 public:
  explicit PagedCache(const PagedCacheOptions& options);
  explicit PagedCache(Unfilled) {}
  // Over a pool and a table that somebody else holds too.
  PagedCache(CacheTensors tensors, at::Tensor references)
      : KVCache(std::move(tensors)), references_(std::move(references)) {}
  PagedCache(const PagedCache&) = delete;  // fork() shares pages, clone() copies the pool
  PagedCache& operator=(const PagedCache&) = delete;

  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  CacheTensors reserve_valid(const at::Tensor& key, const at::Tensor& value,
                             const std::optional<at::Tensor>& new_lens) override;
  // Raises: latents are no keys and values of heads.
  CacheTensors reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) override;
  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;

  // A cache of len(index) sequences on the same pool: sequence i holds what sequence index[i] holds here. It copies no
  // page. index [B'] int64
  std::shared_ptr<PagedCache> fork(const at::Tensor& index) const;
  // These sequences become empty and give their pages back. rows int64
  void release(const at::Tensor& rows);

  // The pages of each sequence in order, then -1; [B, num_pages] int32 on the CPU
  const at::Tensor& block_table() const { return *tensors_.block_table; }
  const at::Tensor& k_pool() const { return tensors_.key; }    // [num_pages, page_size, Hkv, D]
  const at::Tensor& v_pool() const { return tensors_.value; }  // [num_pages, page_size, Hkv, Dv]
  int64_t page_size() const { return tensors_.key.size(1); }
  int64_t num_pages() const { return tensors_.key.size(0); }
  // How many pages of the pool nobody holds.
  int64_t free_pages() const;

  // Copies, gathered from the pages; zeros after the end of a shorter sequence.
  at::Tensor k() const override;
  at::Tensor v() const override;
  // Reads the length tensor: on CUDA this waits for the device, as all calls below do.
  c10::SymInt sym_len() const override;
  // The most positions that the whole pool holds.
  std::optional<int64_t> capacity() const override { return num_pages() * page_size(); }
  // Bytes of the positions that its sequences hold, shared ones counted once. All of the pool is allocated.
  c10::SymInt sym_nbytes() const override;
  void reset() override;
  void crop(const c10::SymInt& n) override;
  // Shares pages. The batch may change.
  void reorder(const at::Tensor& index) override;
  // With a copy of the whole pool.
  std::shared_ptr<KVCache> clone() const override;
  void visit_tensors(TensorVisitor visit) override {
    KVCache::visit_tensors(visit);
    visit_optional(visit, "block_table", tensors_.block_table);
    visit("references", references_);
  }
  void take_back(const CacheBefore& before) override;
  // Gives back the pages after the held positions.
  void give_back();

 protected:
  void check_state() const override;

 private:
  std::vector<int64_t> lengths_on_cpu() const;
  // Keeps the first kept[b] positions of sequence b. State from before still has the others.
  void keep(const std::vector<int64_t>& kept);

  at::Tensor references_;  // [num_pages] int32: how many sequences hold each page
};

}  // namespace attnpack
