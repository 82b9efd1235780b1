#include <bindings/generate.h>

#include <attnpack/core/check.h>

#include <string>

namespace attnpack {

Names names_of_generate(Names first) {
  for (const auto* name : {"max_new_tokens", "cache", "num_return_sequences", "lengths", "stop_tokens", "temperature",
                           "top_k", "top_p", "seed", "callback"})
    first.emplace_back(name);
  return first;
}

at::Tensor run_generate(Arguments& arguments, const std::function<at::Tensor(const GenerateOptions&)>& run) {
  GenerateOptions options(arguments.require<int64_t>("max_new_tokens"));
  if (const auto cache = arguments.take("cache"); cache && py::isinstance<py::str>(cache)) {
    options.cache(cache.cast<std::string>());
  } else if (cache) {
    ATTNPACK_CHECK_TYPE(
        py::isinstance<ModelCache>(cache), "cache is ", shown(cache),
        ", generate wants 'dynamic', 'static', 'sliding', 'paged', 'int8', 'int4', 'none' (everything is "
        "computed anew for each token) or a ModelCache");
    options.model_cache(cache.cast<std::shared_ptr<ModelCache>>());
  }
  if (const auto token = arguments.take("stop_tokens"))
    options.stop_tokens(PyIndex_Check(token.ptr())
                            ? std::vector<int64_t>{read_value<int64_t>("stop_tokens", token, "stop_tokens")}
                            : read_value<std::vector<int64_t>>("stop_tokens", token, "stop_tokens"));
  auto callback = arguments.take("callback");
  if (!callback) callback = py::none();
  if (!callback.is_none() && !PyCallable_Check(callback.ptr()))
    raise_wrong_kind("callback", callback, wanted_by_name("callback", false));
  arguments.read_options(options, {"max_new_tokens", "cache", "model_cache", "stop_tokens", "callback"});
  arguments.finish(kModelCacheDescription);
  // Each step takes the GIL once: for Ctrl-C, and for the callback, which goes on unless it returns False.
  options.callback([&callback](const at::Tensor& tokens) {
    py::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return callback.is_none() || !callback(tokens).is(py::bool_(false));
  });
  return without_gil([&] { return run(options); });
}

}  // namespace attnpack
