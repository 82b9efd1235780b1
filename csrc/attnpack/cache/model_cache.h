#pragma once

#include <attnpack/cache/dynamic_cache.h>
#include <attnpack/cache/static_cache.h>

#include <vector>

namespace attnpack {

// The caches of a model's layers, first layer first.
class ModelCache {
 public:
  // A DynamicCache for each layer.
  explicit ModelCache(int64_t num_layers);
  // A StaticCache for each layer.
  ModelCache(int64_t num_layers, const StaticCacheOptions& options);
  explicit ModelCache(std::vector<std::shared_ptr<KVCache>> layers);

  const std::vector<std::shared_ptr<KVCache>>& layers() const { return layers_; }
  int64_t len() const { return layers_.empty() ? 0 : layers_.front()->len(); }
  // The lengths of the first layer, [B]. All layers hold the same positions.
  const at::Tensor& lengths() const { return layers_.front()->lengths(); }
  int64_t nbytes() const;
  int64_t nbytes_allocated() const;
  void reset();
  // Where a layer refuses, no layer is cropped.
  void crop(const c10::SymInt& n);
  void reorder(const at::Tensor& index);
  std::shared_ptr<ModelCache> clone() const;

  // Runs forward, which appends to one layer after the other; where it raises, every layer is taken back to where it
  // was.
  template <typename Forward>
  auto rollback_on_error(const Forward& forward) {
    return attnpack::rollback_on_error(layers_, forward);
  }

 private:
  std::vector<std::shared_ptr<KVCache>> layers_;
};

}  // namespace attnpack
