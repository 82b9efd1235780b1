#include <attnpack/distributed/detail/agreement.h>
#include <attnpack/distributed/detail/group_names.h>
#include <attnpack/distributed/detail/heads.h>
#include <attnpack/distributed/detail/names.h>
#include <attnpack/distributed/detail/rules.h>
#include <attnpack/distributed/detail/shared_children.h>
#include <attnpack/distributed/detail/validate.h>
#include <bindings/keyword_call.h>
#include <bindings/operator_settings.h>
#include <bindings/register.h>

// Attention by several processes, for eager Python. Groups are names: torch knows them by these.
namespace attnpack {

namespace {

using distributed::Group;

// The arguments of attention over a sequence that is sharded. A value of the wrong kind raises on all ranks, so its
// error waits until they compare; before that only what no rank can do is refused.
struct ContextCall {
  at::Tensor query, key, value;
  std::string group_name, method, layout;
  bool return_lse = false;
  OperatorSettings settings;
  std::exception_ptr failed;

  explicit ContextCall(const GivenArguments& given) {
    try {
      given.read([&](const auto& visit) {
        visit("query", query);
        visit("key", key);
        visit("value", value);
        visit("group_name", group_name);
        visit("method", method);
        visit("layout", layout);
        visit("return_lse", return_lse);
        visit("mask", settings.mask);
        settings.visit(visit);
      });
    } catch (const c10::Error&) {
      if (!value.defined()) throw;
      failed = std::current_exception();
    }
    if (!failed) distributed::refuse_unshared(settings.options());
  }

  // Raises on every rank unless all ranks agree.
  void agree() const {
    distributed::agree_on_attention(query, key, value, group(), settings.options(), distributed::layout_of(layout),
                                    distributed::method_of(method), [&] {
                                      if (failed) std::rethrow_exception(failed);
                                    });
  }
  std::tuple<at::Tensor, at::Tensor> attend() const {
    if (failed) agree();
    return distributed::attention_with_lse(query, key, value, group(), settings.options(),
                                           distributed::layout_of(layout), distributed::method_of(method));
  }

 private:
  Group group() const { return distributed::group_of(group_name); }
};

py::object context_attention_py(const GivenArguments& given) {
  const ContextCall call(given);
  return first_or_both(call.return_lse, [&] { return call.attend(); });
}

py::object agree_on_attention_py(const GivenArguments& given) {
  const ContextCall call(given);
  without_gil([&] { call.agree(); });
  return py::none();
}

// values: what the ranks give, by name; a tensor is compared by its shape and dtype, another value by its text. None is
// nothing.
void agree_py(const std::string& what, const std::string& group_name, at::Device device, const py::dict& values) {
  const auto group = distributed::group_of(group_name);
  if (!distributed::compares(group, device)) return;
  std::vector<std::pair<std::string, std::string>> texts;
  for (const auto& [name, value] : values) {
    if (value.is_none()) continue;
    texts.emplace_back(name.cast<std::string>(), THPVariable_Check(value.ptr())
                                                     ? distributed::shown(value.cast<at::Tensor>())
                                                     : py::str(value).cast<std::string>());
  }
  without_gil([&] { distributed::agree(what, group, device, texts); });
}

}  // namespace

void register_distributed(py::module_& m) {
  add_keyword_function(m, "attention", 7, &context_attention_py);
  add_keyword_function(m, "agree_on_attention", 6, &agree_on_attention_py);
  m.def("agree", &agree_py, "Raises on every rank unless all ranks give the same values.");
  m.def("check_names", [](const std::string& method, const std::string& layout) {
    distributed::method_of(method);
    distributed::layout_of(layout);
  });
  m.def("share_of", [](int64_t size, int64_t ranks, int64_t rank) {
    const auto share = distributed::share_of(size, ranks, rank);
    return std::make_pair(share.first, share.first + share.count);
  });
  m.def("kv_heads_of", [](int64_t first, int64_t stop, int64_t num_heads, int64_t num_kv_heads, const HeadMap& map) {
    const auto read = distributed::kv_heads_of({first, stop - first}, num_heads, num_kv_heads, map);
    return std::make_pair(read.heads, read.map);
  });
  m.def("parts_of", [](const std::string& kind, const std::string& owner, const std::vector<std::string>& parameters) {
    std::vector<const char*> parts;
    for (const auto& name : parameters) parts.push_back(distributed::style_of_parameter(kind, owner, name));
    return parts;
  });
  m.def("check_heads", &distributed::check_heads);
  m.def("check_norm_of_heads", &distributed::check_norm_of_heads);
  m.def("hash_of", [](const py::bytes& bytes) { return distributed::hash_of(std::string_view(bytes)); });
}

}  // namespace attnpack
