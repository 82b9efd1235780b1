#include <bindings/arguments.h>

#include <bindings/common.h>
#include <bindings/keyword_call.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <map>

#include <attnpack/core/padded.h>

namespace attnpack {

namespace {

const std::string kMake = ": torch.tensor() makes one of a list";

// The words for names whose type does not say all. Those of a tensor end with the fix for a list.
const std::map<std::string, std::string>& descriptions() {
  static const std::map<std::string, std::string> words = [] {
    std::map<std::string, std::string> w{
        {"query", "a tensor [batch, num_heads, q_len, head_dim]"},
        {"key", "a tensor [batch, num_kv_heads, kv_len, head_dim]"},
        {"value", "a tensor [batch, num_kv_heads, kv_len, v_head_dim]"},
        {"ids", "an int64 tensor [batch, length] of token numbers" + kMake},
        {"weights", "a list of tensors"},
        {"biases", "a list of tensors"},
        {"inv_freq", "a list of numbers: call .tolist() on a tensor"},
        {"short_factor", "a list of numbers"},
        {"long_factor", "a list of numbers"},
        {"window", "two ints (left, right), -1 for unbounded"},
        {"softcap", "a number, 0 for none"},
        {"dropout", "a number, 0 for none"},
        {"attention_dropout", "a number, 0 for none"},
        {"dropout_p", "a number, 0 <= dropout_p < 1"},
        {"cu_seqlens_q", "an int32 or int64 tensor [sequences + 1], where each sequence begins, and the end" + kMake},
        {"stage", "'scaled', 'capped', 'masked' or 'probs'"},
        {"path", "'auto', 'expanded' or 'absorbed'"},
        {"norm", "'rms', 'rms_plus_one' or 'layer'"},
        {"activation", "a word such as 'swiglu' or 'gelu'"},
        {"selector", "'indexer', 'mean' or 'max'"},
        {"gate_activation", "'sigmoid' or 'softplus'"},
        {"position_embedding", "'rope', 'learned', 'sinusoidal' or 'none'"},
        {"scores", "'softmax' or 'sigmoid'"},
        {"rope_type", "a word such as 'linear'"},
        {"stop_tokens", "a token number or a list of them, () for none"},
        {"callback", "a function of each step's tokens [B], or None"},
        {"encoder", "an Encoder of attnpack.cpp"},
        {"decoder", "a Decoder of attnpack.cpp"},
        {"embed_tokens", "an Embedding of attnpack.cpp, or None"},
        {"positions", "an int64 tensor" + kMake},
        {"rope", "(inv_freq, factor, interleaved), the settings of a RotaryEmbedding, or None"},
        {"method", "a word such as 'mean'"},
        {"state_dict", "a dict of names and tensors"},
        {"layout", "'concat', 'grouped' or 'conv1d'"},
        {"layers", "the number of the model's layers, or a list with a cache of attnpack.cpp for each"},
    };
    for (const auto* name :
         {"x", "q", "k", "v", "source", "target", "out_a", "lse_a", "out_b", "lse_b", "cos", "sin", "input", "weight"})
      w[name] = "a tensor" + kMake;
    for (const std::string function : {"linear_attention", "linear_attention_"}) {
      for (const auto* name : {"query", "key"})
        w[function + "." + name] = "a tensor [batch, num_k_heads, length, head_dim]";
      w[function + ".value"] = "a tensor [batch, num_v_heads, length, v_head_dim]";
    }
    w["attention_varlen.query"] = "a tensor [tokens, num_heads, head_dim]";
    w["attention_varlen.key"] = "a tensor [key tokens, num_kv_heads, head_dim], or a pool of pages";
    w["attention_varlen.value"] = "a tensor [key tokens, num_kv_heads, v_head_dim], or a pool of pages";
    for (const std::string function : {"select_keys", "index_keys", "indexer_loss"})
      w[function + ".weights"] = "a tensor [batch, length, heads]";
    return w;
  }();
  return words;
}

// The same for arguments that may be None.
const std::map<std::string, std::string>& descriptions_or_none() {
  static const std::map<std::string, std::string> words = [] {
    std::map<std::string, std::string> w{
        {"positions", "an int64 tensor [length] or [batch, length], or None" + kMake},
        {"sinks", "a float tensor [num_heads], or None" + kMake},
        {"query_scale", "a float tensor [q_len] or [batch, q_len], or None" + kMake},
        {"attention_varlen.query_scale", "a float tensor [tokens], or None" + kMake},
        {"alibi_slopes", "a float tensor [num_heads], or None" + kMake},
        {"head_map", "a list of num_heads ints, or None: call .tolist() on a tensor"},
        {"scale", "a number, or None for 1 / sqrt(head_dim)"},
        {"temperature", "a number, 0 for greedy, or None"},
        {"top_p", "a number in (0, 1], or None"},
        {"seed", "an int from 0 to 2**64 - 1, or None for torch's own generator"},
        {"cu_seqlens_k", "an int32 or int64 tensor [sequences + 1], or None for cu_seqlens_q" + kMake},
        {"max_seqlen_q", "an int, or None"},
        {"max_seqlen_k", "an int, or None"},
        {"block_table", "an int32 tensor [sequences, max_pages], or None" + kMake},
        {"bias", "a tensor [out], or None"},
        {"log_decay", "a float tensor [batch, heads, length] or [batch, heads, length, head_dim], or None" + kMake},
        {"beta", "a float tensor [batch, heads, length], or None" + kMake},
        {"initial_state", "a float tensor, the state of each sequence before its first token, or None" + kMake},
        {"cu_seqlens", "an int32 or int64 tensor [sequences + 1], or None" + kMake},
        {"cache", "the tensors (key, value, lengths), or None"},
        {"key_index", "an int32 or int64 tensor [batch, 1 or num_kv_heads, q_len, n], or None" + kMake},
        {"window", "two ints (left, right), -1 for unbounded"},
        {"layout", "'sandwich', 'output', 'parallel', 'parallel_two', or None"},
        {"q_lora_rank", "an int"},  // of a dict, where None counts as left out
        {"gate", "'head', 'element', or None"},
        {"index_cache", "an attnpack.cpp.LatentCache() for the indexer's keys, or None"},
        {"kv_from", "the attnpack.cpp.DynamicCache() or StaticCache of another layer, or None"},
        {"kv_lora_rank", "an int"},
        {"qk_nope_head_dim", "an int"},
        {"qk_rope_head_dim", "an int"},
        {"v_head_dim", "an int"},
        {"groups", "a list of lists of heads, as [[0, 1], [2, 3]], or None"},
        {"factor", "a number"},
        {"attention_factor", "a number"},
        {"original_max_position_embeddings", "an int"},
    };
    for (const auto* name : {"context", "value_context"}) w[name] = "a tensor, or None" + kMake;
    for (const auto* name : {"mask", "context_mask"})
      w[name] = "a bool or float tensor that broadcasts to [batch, num_heads, q_len, kv_len], or None" + kMake;
    for (const auto* name : {"kv_lens", "lengths", "source_lens", "target_lens", "context_lens"})
      w[name] = "an int32 or int64 tensor [batch], or None" + kMake;
    return w;
  }();
  return words;
}

}  // namespace

std::string shown(const py::handle& argument) {
  const py::object kind = py::type::of(argument);
  auto type = kind.attr("__name__").cast<std::string>();
  if (kind.attr("__module__").cast<std::string>() == "attnpack._C.cpp") type = "attnpack.cpp." + type;
  const auto text = py::repr(argument).cast<std::string>();
  return text.size() > 60 || text.find('\n') != std::string::npos ? with_article(type) : text + " (" + type + ")";
}

std::string with_article(const std::string& noun) {
  return (std::string("AEIOUaeiou").find(noun[0]) == std::string::npos ? "a " : "an ") + noun;
}

std::string wanted_by_name(const std::string& name, bool or_none) {
  const auto& table = or_none ? descriptions_or_none() : descriptions();
  auto found = table.find(name);
  if (found == table.end()) found = table.find(name.substr(name.find('.') + 1));  // the same for any function
  return found == table.end() ? "" : found->second;
}

std::string wrong_kind(const std::string& name, const py::handle& value, const std::string& wanted) {
  return "attnpack: " + name + " is " + shown(value) + ", wants " + wanted;
}

void raise_wrong_kind(const std::string& name, const py::handle& value, const std::string& wanted) {
  TORCH_CHECK_TYPE(false, wrong_kind(name, value, wanted));
}

void raise_unexpected_keyword(const std::string& function, const std::string& name, const Names& taken,
                              const std::string& cache) {
  const auto takes = [&](const char* other) { return std::find(taken.begin(), taken.end(), other) != taken.end(); };
  std::string hint;
  if (name == "kv_cache" || name == "past_key_value" || name == "past_key_values") {
    hint = takes("cache") ? ": use cache= with " + cache : ": it keeps no cache, leave it out";
  } else if ((name == "attn_mask" || name == "attention_mask") && takes("mask")) {
    hint = ": use mask=, which says where attention may go";
  } else if ((name == "head_map" || name == "num_kv_heads") && takes("num_heads")) {
    hint = ": use GroupedQueryAttention";
  }
  ATTNPACK_CHECK_TYPE(false, function, "() got an unexpected keyword argument '", name, "'", hint);
}

void check_not_nested(std::string_view name, const py::handle& value) {
  if (value.is_none() || !THPVariable_Check(value.ptr())) return;
  if (const at::Tensor& tensor = THPVariable_Unpack(value.ptr()); tensor.is_nested())
    check_padded(std::string(name), tensor);
}

std::optional<int64_t> read_index(const py::handle& value) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) return std::nullopt;
  int overflow = 0;
  const auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  const int64_t number = whole ? PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow) : -1;
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return failed || overflow != 0 ? std::nullopt : std::make_optional(number);
}

std::optional<uint64_t> read_unsigned(const py::handle& value) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) return std::nullopt;
  const auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  const uint64_t number = whole ? PyLong_AsUnsignedLongLong(whole.ptr()) : 0;
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return failed ? std::nullopt : std::make_optional(number);
}

bool is_list(const py::handle& value) {
  if (PyTuple_CheckExact(value.ptr()) || PyList_CheckExact(value.ptr())) return true;
  return PySequence_Check(value.ptr()) && !PyUnicode_Check(value.ptr()) && !PyBytes_Check(value.ptr()) &&
         !THPVariable_Check(value.ptr());
}

std::optional<std::shared_ptr<KVCache>> Reader<std::shared_ptr<KVCache>>::read(const py::handle& value) {
  if (value.is_none()) return nullptr;
  if (!py::isinstance<KVCache>(value)) return std::nullopt;
  return value.cast<std::shared_ptr<KVCache>>();
}

std::optional<std::shared_ptr<ModelCache>> Reader<std::shared_ptr<ModelCache>>::read(const py::handle& value) {
  if (value.is_none()) return nullptr;
  if (!py::isinstance<ModelCache>(value)) return std::nullopt;
  return value.cast<std::shared_ptr<ModelCache>>();
}

std::optional<RotaryEmbedding> Reader<RotaryEmbedding>::read(const py::handle& value) {
  if (value.is_none()) return RotaryEmbedding(nullptr);
  if (!py::isinstance<RotaryEmbeddingImpl>(value)) return std::nullopt;
  return RotaryEmbedding(value.cast<std::shared_ptr<RotaryEmbeddingImpl>>());
}

namespace {

// A plain function of the module: its closure lies in a capsule, as does its definition, which Python keeps no copy of.
struct PlainFunction {
  std::string name;
  PlainCall call;
  PyMethodDef definition;
};

PyObject* call_plain(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    const auto* function = static_cast<PlainFunction*>(PyCapsule_GetPointer(self, nullptr));
    return function->call(arguments, static_cast<size_t>(count)).release().ptr();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

}  // namespace

void add_plain_function(py::module_& m, const char* name, PlainCall call) {
  auto* function = new PlainFunction{name, std::move(call), {}};
  function->definition = {function->name.c_str(), reinterpret_cast<PyCFunction>(&call_plain), METH_FASTCALL, nullptr};
  const py::capsule self(function, [](void* pointer) { delete static_cast<PlainFunction*>(pointer); });
  m.add_object(name, py::reinterpret_steal<py::object>(PyCFunction_New(&function->definition, self.ptr())));
}

void add_keyword_function(py::module_& m, const char* name, size_t placed, KeywordCall call) {
  add_plain_function(m, name, [=](PyObject* const* values, size_t count) {
    ATTNPACK_CHECK_TYPE(count == placed + 1 && PyDict_Check(values[placed]), name, "() takes ", placed,
                        " arguments by place, and a dict of the others");
    return call(GivenArguments(name, values, placed));
  });
}

size_t InternedNames::find(PyObject* name, size_t first) const {
  for (size_t i = first; i < names_.size(); ++i)
    if (names_[i] == name) return i;
  for (size_t i = first; i < names_.size(); ++i)
    if (PyUnicode_Check(name) && PyUnicode_Compare(names_[i], name) == 0) return i;
  return kNone;
}

Names InternedNames::all() const {
  Names all;
  for (PyObject* name : names_) all.push_back(py::handle(name).cast<std::string>());
  return all;
}

GivenArguments::GivenArguments(const char* function, PyObject* const* values, size_t placed)
    : function_(function), values_(values), placed_(placed), keywords_(values[placed]) {}

GivenArguments::GivenArguments(const char* function, PyObject* const* values, size_t placed, PyObject* names)
    : function_(function),
      values_(values),
      placed_(placed),
      names_(names),
      count_(names == nullptr ? 0 : PyTuple_GET_SIZE(names)) {}

void GivenArguments::raise_unknown(PyObject* name, const InternedNames& taken) const {
  if (keywords_ == nullptr) throw UnknownName();
  raise_unexpected_keyword(function_, py::str(name).cast<std::string>(), taken.all(), "the tensors of a cache");
}

void add_named_function(py::module_& m, const char* name, const Names& names, NamedCall call) {
  m.def(name, [=](const py::args& args, const py::kwargs& kwargs) {
    Arguments arguments(name, names, args, kwargs);
    return call(arguments);
  });
}

bool has_name(const Names& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Arguments::Arguments(const char* function, const Names& positional, const py::args& args, const py::kwargs& kwargs)
    : function_(function), given_(kwargs) {
  ATTNPACK_CHECK_TYPE(args.size() <= positional.size(), function_, "() got ", args.size(),
                      " arguments without names, takes ",
                      positional.empty() ? "none" : "(" + joined_by(", ", positional) + ") at most",
                      ": give the others by name, or leave them out");
  for (size_t i = 0; i < args.size(); ++i) {
    ATTNPACK_CHECK_TYPE(!given_.contains(positional[i]), function_, "() got ", positional[i],
                        " twice, by place and by name: leave one of them out");
    given_[positional[i].c_str()] = args[i];
  }
}

py::object Arguments::take(const char* name) {
  taken_.push_back(name);
  return !given_.empty() && given_.contains(name) ? given_.attr("pop")(name) : py::object();
}

void Arguments::finish(const std::string& cache) {
  for (const auto& [name, value] : given_)
    raise_unexpected_keyword(function_, name.cast<std::string>(), Names(taken_.begin(), taken_.end()), cache);
}

void Arguments::raise_missing(const char* name) const {
  ATTNPACK_CHECK_TYPE(false, function_, "() lacks the argument ", name);
}

Factory Arguments::take_factory() {
  const auto device = take("device"), dtype = take("dtype");
  return make_factory(device ? device : py::none(), dtype ? dtype : py::none());
}

}  // namespace attnpack
