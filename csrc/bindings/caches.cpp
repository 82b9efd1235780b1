#include <attnpack/cache/cross_cache.h>
#include <attnpack/cache/detail/rules.h>
#include <attnpack/cache/latent_cache.h>
#include <attnpack/cache/model_cache.h>
#include <attnpack/cache/paged_cache.h>
#include <attnpack/cache/quantized_cache.h>
#include <attnpack/cache/recurrent_cache.h>
#include <attnpack/cache/sliding_window_cache.h>
#include <attnpack/cache/sparse_cache.h>
#include <bindings/common.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

// DynamicCache and StaticCache over given tensors.
template <typename Cache>
void bind_tensors(py::class_<Cache, KVCache, std::shared_ptr<Cache>>& cls) {
  cls.def_static(
         "from_tensors",
         [](const at::Tensor& key, const at::Tensor& value, const at::Tensor& lengths) {
           return std::make_shared<Cache>(CacheTensors{key, value, lengths});
         },
         py::arg("key"), py::arg("value"), py::arg("lengths"))
      .def("tensors", [](Cache& self) {
        const auto& t = self.tensors();
        return py::make_tuple(t.key, t.value, t.lengths);
      });
}

// A tensor, or a list of ints.
at::Tensor as_index(const py::object& index, const char* name = "index") {
  check_not_nested(name, index);
  if (THPVariable_Check(index.ptr())) return index.cast<at::Tensor>();
  const auto rows = Reader<std::vector<int64_t>>::read(index);
  if (!rows) raise_wrong_kind(name, index, "int64 sequence numbers [B]: a tensor, or a list of ints");
  return at::tensor(*rows, at::kLong);
}

// DynamicCache(batch=1, num_kv_heads=2, len=3, head_dim=4, dtype=torch.float32, bytes=192), as Python's.
std::string describe_cache(const std::string& name, const KVCache& cache) {
  if (cache.lengths().is_meta()) return text_of({name, "(device=meta)"});  // its lengths hold no numbers
  if (const auto* with_states = dynamic_cast<const RecurrentCache*>(&cache); with_states && cache.len() > 0)
    return text_of({name, "(batch=", cache.lengths().size(0), ", len=", cache.len(), ", bytes=", cache.nbytes(), ")"});
  if (!cache.k().defined()) return text_of({name, "(len=0)"});
  const auto k = cache.k();
  return text_of({name, "(batch=", k.size(0), ", num_kv_heads=", k.size(1), ", len=", cache.len(),
                  ", head_dim=", k.size(3), ", dtype=", py::str(py::cast(k.scalar_type())).cast<std::string>(),
                  ", bytes=", cache.nbytes(), ")"});
}

// Binds a rule for eager calls, which pybind serves faster than the dispatcher.
template <typename Result, typename... Rest>
void bind_rule(py::module_& m, const char* name, Result (*rule)(const CacheSnapshot&, Rest...)) {
  m.def(name, [rule](std::string_view kind, const OptionalTensors& tensors, c10::SymIntArrayRef numbers, Rest... rest) {
    return rule({kind, tensors, numbers}, rest...);
  });
}

// A window as an int, how many positions before, or as (left, right).
Window read_window(const py::object& window) {
  if (const auto left = read_index(window)) return {*left, 0};
  if (const auto both = Reader<Window>::read(window)) return *both;
  raise_wrong_kind("window", window, "how many positions before its own each one sees: an int, or (left, 0)");
}

Changed sliding_window_cache_py(const py::object& window, const py::object& keep_first) {
  const auto [left, right] = read_window(window);
  return sliding_window_cache(left, right, read_value<int64_t>("keep_first", keep_first, "keep_first"));
}

Changed static_cache_py(int64_t batch, int64_t num_kv_heads, int64_t max_len, int64_t head_dim,
                        std::optional<int64_t> v_head_dim, const py::object& dtype, const py::object& device) {
  const auto factory = make_factory(device, dtype);
  return static_cache(batch, num_kv_heads, max_len, head_dim, v_head_dim, factory.dtype, factory.device);
}

Changed paged_cache_py(int64_t batch, int64_t num_kv_heads, int64_t head_dim, int64_t page_size, int64_t num_pages,
                       std::optional<int64_t> v_head_dim, const py::object& dtype, const py::object& device) {
  const auto factory = make_factory(device, dtype);
  return paged_cache(batch, num_kv_heads, head_dim, page_size, num_pages, v_head_dim, factory.dtype, factory.device);
}

void bind_rules(py::module_& m) {
  bind_rule(m, "cache_reserve", &cache_reserve);
  bind_rule(m, "cache_reserve_latents", &cache_reserve_latents);
  bind_rule(m, "cache_reserve_index", &cache_reserve_index);
  bind_rule(m, "cache_keep_sums", &cache_keep_sums);
  bind_rule(m, "cache_commit", &cache_commit);
  bind_rule(m, "cache_states", &cache_states);
  bind_rule(m, "cache_advance", &cache_advance);
  bind_rule(m, "cache_reset", &cache_reset);
  bind_rule(
      m, "cache_crop", +[](const CacheSnapshot& snapshot, const py::object& n) {
        return cache_crop(snapshot, read_value<int64_t>("n", n, "n"));
      });
  bind_rule(m, "cache_clone", &cache_clone);
  bind_rule(m, "cache_store", &cache_store);
  bind_rule(m, "cache_check_call", &cache_check_call);
  bind_rule(m, "cache_len", &cache_len);
  bind_rule(m, "cache_nbytes", &cache_nbytes);
  bind_rule(m, "cache_nbytes_allocated", &cache_nbytes_allocated);
  bind_rule(m, "cache_part", &cache_part);
  bind_rule(m, "cache_views", &cache_views);
  bind_rule(m, "cache_shared", &cache_shared);
  bind_rule(
      m, "cache_reorder",
      +[](const CacheSnapshot& snapshot, const py::object& index) { return cache_reorder(snapshot, as_index(index)); });
  bind_rule(
      m, "cache_fork",
      +[](const CacheSnapshot& snapshot, const py::object& index) { return cache_fork(snapshot, as_index(index)); });
  bind_rule(
      m, "cache_release", +[](const CacheSnapshot& snapshot, const py::object& rows) {
        return cache_release(snapshot, as_index(rows, "rows"));
      });
  bind_rule(m, "cache_give_back", &cache_give_back);
  m.def("new_cache", &new_cache);
  m.def("sliding_window_cache", &sliding_window_cache_py);
  m.def("quantized_cache", [](const py::object& bits, const py::object& exact_first, const py::object& exact_last) {
    return quantized_cache(read_value<int64_t>("bits", bits, "bits"),
                           read_value<int64_t>("exact_first", exact_first, "exact_first"),
                           read_value<int64_t>("exact_last", exact_last, "exact_last"));
  });
  define(m, "paged_cache", &paged_cache_py,
         {"batch", "num_kv_heads", "head_dim", "page_size", "num_pages", "v_head_dim", "dtype", "device"});
  define(m, "static_cache", &static_cache_py,
         {"batch", "num_kv_heads", "max_len", "head_dim", "v_head_dim", "dtype", "device"});
  m.def("room_names", &room_names);
  m.def("cache_tensor_names", &cache_tensor_names);
  m.def("cache_number_names", &cache_number_names);
  // A cache of Python lends its tensors to the C++ loop, and takes over those that the loop leaves.
  m.def("lend_cache", [](std::string_view kind, const OptionalTensors& tensors, c10::SymIntArrayRef numbers) {
    return CacheSnapshot{kind, tensors, numbers}.make();
  });
  m.def("cache_state", [](const KVCache& cache) {
    auto state = cache.state();
    return std::make_tuple(std::move(state.tensors), std::move(state.numbers));
  });
  m.def("describe_cache", &describe_cache);
}

template <typename T>
void bind_common(py::class_<T, std::shared_ptr<T>>& cls) {
  cls.def("__len__", &T::len);
  cls.def("__bool__", [](const T&) { return true; });  // an empty cache is a cache
  bind_property(cls, "lengths", &T::lengths);
  bind_property(cls, "nbytes", &T::nbytes);
  bind_property(cls, "nbytes_allocated", &T::nbytes_allocated);
  bind_method(cls, "reset", {}, 0, [](T& self, Arguments& arguments) {
    arguments.finish();
    self.reset();
  });
  bind_method(cls, "clone", {}, 0, [](T& self, Arguments& arguments) {
    arguments.finish();
    return self.clone();
  });
  bind_method(cls, "reorder", {"index"}, 1, [](T& self, Arguments& arguments) {
    const auto index = arguments.require<py::object>("index");
    arguments.finish();
    self.reorder(as_index(index));
  });
  bind_method(cls, "crop", {"n"}, 1, [](T& self, Arguments& arguments) {
    const auto n = arguments.require<int64_t>("n");
    arguments.finish();
    self.crop(n);
  });
}

// A constructor without arguments.
template <typename Cache>
std::shared_ptr<Cache> make_growing(const char* name, const py::args& args, const py::kwargs& kwargs) {
  Arguments(name, {}, args, kwargs).finish();
  return std::make_shared<Cache>();
}

std::shared_ptr<ModelCache> make_model_cache(const py::args& args, const py::kwargs& kwargs) {
  Arguments arguments("ModelCache", {"layers"}, args, kwargs);
  auto layers = arguments.take("num_layers");
  if (!layers) layers = arguments.require<py::object>("layers");
  arguments.finish();
  if (PyIndex_Check(layers.ptr())) return std::make_shared<ModelCache>(read_value<int64_t>("layers", layers, "layers"));
  if (!py::isinstance<py::list>(layers) && !py::isinstance<py::tuple>(layers))
    raise_wrong_kind("layers", layers, wanted_by_name("layers", false));
  std::vector<std::shared_ptr<KVCache>> caches;
  for (const auto& layer : layers) {
    if (!py::isinstance<KVCache>(layer))
      raise_wrong_kind(text_of({"layers[", caches.size(), "]"}), layer,
                       "an attnpack.cpp.DynamicCache() or StaticCache");
    caches.push_back(layer.cast<std::shared_ptr<KVCache>>());
  }
  return std::make_shared<ModelCache>(std::move(caches));
}

}  // namespace

void register_caches(py::module_& m) {
  bind_rules(m);
  py::class_<KVCache, std::shared_ptr<KVCache>> base(m, "KVCache");
  bind_common(base);
  base.def("__repr__", [](const py::object& self) {
    const auto name = py::type::of(self).attr("__name__").cast<std::string>();
    return describe_cache(name, self.cast<const KVCache&>());
  });
  bind_property(base, "k", &KVCache::k);
  bind_property(base, "v", &KVCache::v);

  py::class_<DynamicCache, KVCache, std::shared_ptr<DynamicCache>> dynamic(m, "DynamicCache");
  dynamic.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    return make_growing<DynamicCache>("DynamicCache", args, kwargs);
  }));
  bind_tensors(dynamic);

  py::class_<LatentCache, DynamicCache, std::shared_ptr<LatentCache>> latent(m, "LatentCache");
  latent
      .def(py::init([](const py::args& args, const py::kwargs& kwargs) {
        return make_growing<LatentCache>("LatentCache", args, kwargs);
      }))
      .def_static(
          "from_tensors",
          [](const at::Tensor& key, const at::Tensor& value, const at::Tensor& lengths, int64_t kv_lora_rank) {
            return std::make_shared<LatentCache>(CacheTensors{key, value, lengths}, kv_lora_rank);
          },
          py::arg("key"), py::arg("value"), py::arg("lengths"), py::arg("kv_lora_rank"));
  bind_property(latent, "c", &LatentCache::v);
  bind_property(latent, "k_rope", &LatentCache::k_rope);
  bind_property(latent, "kv_lora_rank", &LatentCache::kv_lora_rank);
  bind_property(latent, "index", &LatentCache::index);

  py::class_<SparseCache, DynamicCache, std::shared_ptr<SparseCache>> sparse(m, "SparseCache");
  sparse.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    return make_growing<SparseCache>("SparseCache", args, kwargs);
  }));
  bind_property(sparse, "index", &SparseCache::index);
  bind_property(sparse, "block", &SparseCache::block);

  py::class_<SlidingWindowCache, KVCache, std::shared_ptr<SlidingWindowCache>> sliding(m, "SlidingWindowCache");
  sliding.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    Arguments arguments("SlidingWindowCache", {"window"}, args, kwargs);
    SlidingWindowCacheOptions options(read_window(arguments.require<py::object>("window")));
    int64_t keep_first = 0;
    arguments.read("keep_first", keep_first);
    arguments.finish();
    return std::make_shared<SlidingWindowCache>(options.keep_first(keep_first));
  }));
  bind_property(sliding, "window", [](const SlidingWindowCache& self) { return py::make_tuple(self.window(), 0); });
  bind_property(sliding, "keep_first", &SlidingWindowCache::keep_first);
  bind_property(sliding, "dropped", &SlidingWindowCache::dropped);

  py::class_<QuantizedCache, KVCache, std::shared_ptr<QuantizedCache>> quantized(m, "QuantizedCache");
  quantized.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    return std::make_shared<QuantizedCache>(
        options_of_call<QuantizedCacheOptions, int64_t>("QuantizedCache", args, kwargs));
  }));
  bind_property(quantized, "bits", &QuantizedCache::bits);
  bind_property(quantized, "exact_first", &QuantizedCache::exact_first);
  bind_property(quantized, "exact_last", &QuantizedCache::exact_last);
  bind_property(quantized, "kv_lora_rank", &QuantizedCache::kv_lora_rank);
  py::class_<PagedCache, KVCache, std::shared_ptr<PagedCache>> paged(m, "PagedCache");
  paged.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    return std::make_shared<PagedCache>(
        options_of_call<PagedCacheOptions, int64_t, int64_t, int64_t, int64_t>("PagedCache", args, kwargs));
  }));
  bind_property(paged, "block_table", &PagedCache::block_table);
  bind_property(paged, "k_pool", &PagedCache::k_pool);
  bind_property(paged, "v_pool", &PagedCache::v_pool);
  bind_property(paged, "page_size", &PagedCache::page_size);
  bind_property(paged, "num_pages", &PagedCache::num_pages);
  bind_property(paged, "free_pages", &PagedCache::free_pages);
  bind_method(paged, "fork", {"index"}, 1, [](PagedCache& self, Arguments& arguments) {
    const auto index = arguments.require<py::object>("index");
    arguments.finish();
    return self.fork(as_index(index));
  });
  bind_method(paged, "release", {"rows"}, 1, [](PagedCache& self, Arguments& arguments) {
    const auto rows = arguments.require<py::object>("rows");
    arguments.finish();
    self.release(as_index(rows, "rows"));
  });

  py::class_<CrossCache, KVCache, std::shared_ptr<CrossCache>> cross(m, "CrossCache");
  cross.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    return make_growing<CrossCache>("CrossCache", args, kwargs);
  }));
  bind_property(cross, "filled", &CrossCache::filled);

  py::class_<RecurrentCache, KVCache, std::shared_ptr<RecurrentCache>> recurrent(m, "RecurrentCache");
  recurrent.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    return make_growing<RecurrentCache>("RecurrentCache", args, kwargs);
  }));
  bind_property(recurrent, "conv_state", &RecurrentCache::conv_state);
  bind_property(recurrent, "state", &RecurrentCache::state_matrix);

  py::class_<StaticCache, KVCache, std::shared_ptr<StaticCache>> fixed(m, "StaticCache");
  fixed.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    return std::make_shared<StaticCache>(
        options_of_call<StaticCacheOptions, int64_t, int64_t, int64_t, int64_t>("StaticCache", args, kwargs));
  }));
  bind_tensors(fixed);

  py::class_<ModelCache, std::shared_ptr<ModelCache>> model(m, "ModelCache");
  model.def(py::init(&make_model_cache)).def("__repr__", [](const ModelCache& self) {
    const auto first = py::repr(py::cast(self.layers().front())).cast<std::string>();
    return text_of({"ModelCache(", self.layers().size(), " layers, bytes=", self.nbytes(), ", first: ", first, ")"});
  });
  bind_property(model, "layers", &ModelCache::layers);
  bind_common(model);
}

}  // namespace attnpack
