#include <attnpack/cache/model_cache.h>

#include <ATen/ATen.h>

#include <set>

#include <attnpack/core/check.h>

namespace attnpack {

namespace {

void check_num_layers(int64_t num_layers) {
  constexpr int64_t kMost = 1 << 16;  // more than any model has, and little memory
  ATTNPACK_CHECK(num_layers > 0 && num_layers <= kMost, "num_layers: got ", num_layers, ", want 1 to ", kMost);
}

}  // namespace

ModelCache::ModelCache(int64_t num_layers) {
  check_num_layers(num_layers);
  for (int64_t i = 0; i < num_layers; ++i) layers_.push_back(std::make_shared<DynamicCache>());
}

ModelCache::ModelCache(int64_t num_layers, const StaticCacheOptions& options) {
  check_num_layers(num_layers);
  for (int64_t i = 0; i < num_layers; ++i) layers_.push_back(std::make_shared<StaticCache>(options));
}

ModelCache::ModelCache(std::vector<std::shared_ptr<KVCache>> layers) : layers_(std::move(layers)) {
  ATTNPACK_CHECK(!layers_.empty(), "layers: got none, want the cache of each layer");
  std::set<const KVCache*> seen;
  for (size_t i = 0; i < layers_.size(); ++i) {
    ATTNPACK_CHECK(layers_[i], "layers[", i, "]: got none, want the cache of that layer");
    ATTNPACK_CHECK(seen.insert(layers_[i].get()).second, "layers[", i,
                   "]: got the cache of an earlier layer, want one for each layer");
  }
}

int64_t ModelCache::nbytes() const {
  int64_t bytes = 0;
  for (const auto& layer : layers_) bytes += layer->nbytes();
  return bytes;
}

int64_t ModelCache::nbytes_allocated() const {
  int64_t bytes = 0;
  for (const auto& layer : layers_) bytes += layer->nbytes_allocated();
  return bytes;
}

void ModelCache::reset() {
  for (const auto& layer : layers_) layer->reset();
}

void ModelCache::crop(const c10::SymInt& n) {
  rollback_on_error([&] {
    for (const auto& layer : layers_) layer->crop(n);
  });
}

void ModelCache::reorder(const at::Tensor& index) {
  const bool filled = lengths().size(0) > 0;
  for (const auto& layer : layers_)
    if (!filled || layer->lengths().size(0) > 0) layer->reorder(index);  // a layer without keys of its own holds none
}

std::shared_ptr<ModelCache> ModelCache::clone() const {
  std::vector<std::shared_ptr<KVCache>> copies;
  for (const auto& layer : layers_) copies.push_back(layer->clone());
  return std::make_shared<ModelCache>(std::move(copies));
}

}  // namespace attnpack
