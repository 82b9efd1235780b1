#include <torch/library.h>

#include <attnpack/ops/kv_cache_paged.h>

TORCH_LIBRARY_IMPL(attnpack, Meta, m) { m.impl("kv_cache_append_paged_", attnpack::check_kv_cache_append_paged); }
