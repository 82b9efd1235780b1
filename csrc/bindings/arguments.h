#pragma once

#include <bindings/torch_pybind.h>

#include <attnpack/cache/model_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/leaf.h>
#include <attnpack/modules/rotary_embedding.h>

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

// The arguments of a call from Python, read by name into C++ values. An argument that does not fit raises a sentence
// that names it.
namespace attnpack {

using Names = std::vector<std::string>;

// A wrong argument as an error message shows it: `'yes' (str)`; for a module or tensor only the type, because its
// text is long.
std::string shown(const py::handle& argument);

// "a module", "an attention module"
std::string with_article(const std::string& noun);

// The right kind of value for an argument of this name, in words; empty where the type says it. The name may stand
// after that of its function, "linear_attention.query", which may have words of its own.
std::string wanted_by_name(const std::string& name, bool or_none);

// The words that say what the argument cache= takes.
inline const std::string kLayerCacheDescription = "an attnpack.cpp.DynamicCache() or StaticCache, or None";
inline const std::string kModelCacheDescription = "an attnpack.cpp.ModelCache(num_layers), or None";

// The sentence for an argument of the wrong kind.
std::string wrong_kind(const std::string& name, const py::handle& value, const std::string& wanted);

// Raise a TypeError.
[[noreturn]] void raise_wrong_kind(const std::string& name, const py::handle& value, const std::string& wanted);
[[noreturn]] void raise_unexpected_keyword(const std::string& function, const std::string& name, const Names& taken,
                                           const std::string& cache);

// Raises a ValueError for a nested tensor.
void check_not_nested(std::string_view name, const py::handle& value);

// An int, or what Python uses as one (numpy's ints, a tensor of one int): neither a bool nor a float.
std::optional<int64_t> read_index(const py::handle& value);
std::optional<uint64_t> read_unsigned(const py::handle& value);
template <typename T>
std::optional<T> read_int(const py::handle& value) {
  if constexpr (std::is_unsigned_v<T>) return read_unsigned(value);
  return read_index(value);
}

// How a Python value becomes a T. read gives none for a value of the wrong kind; wanted says what the right kind is.
template <typename T>
struct Reader {
  static std::optional<T> read(const py::handle& value) {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) return read_int<T>(value);
    py::detail::make_caster<T> caster;
    if (!caster.load(value, /*convert=*/true)) return std::nullopt;
    return py::detail::cast_op<T>(std::move(caster));
  }
  static std::string wanted(const std::string& name) {
    if constexpr (std::is_same_v<T, bool>) return "True or False";
    if constexpr (std::is_integral_v<T>) return name == "n" ? "an int, how many positions to keep" : "an int";
    if (auto words = wanted_by_name(name, false); !words.empty()) return words;
    if constexpr (std::is_floating_point_v<T>) return "a number";
    if constexpr (std::is_same_v<T, std::string>) return "a str";
    if constexpr (std::is_same_v<T, at::Tensor>) return "a tensor";
    return "another kind of value";
  }
};

template <typename T>
struct Reader<std::optional<T>> {
  static std::optional<std::optional<T>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<T>();
    auto read = Reader<T>::read(value);
    return read ? std::make_optional(std::move(read)) : std::nullopt;
  }
  static std::string wanted(const std::string& name) {
    if constexpr (std::is_same_v<T, bool>) return "True or False";
    if (auto words = wanted_by_name(name, true); !words.empty()) return words;
    return Reader<T>::wanted(name) + ", or None";
  }
};

// A sequence that is no text.
bool is_list(const py::handle& value);

template <>
struct Reader<std::vector<int64_t>> {
  static std::optional<std::vector<int64_t>> read(const py::handle& value) {
    if (!is_list(value)) return std::nullopt;
    std::vector<int64_t> numbers;
    for (const auto& item : py::reinterpret_borrow<py::object>(value)) {
      const auto number = read_index(item);
      if (!number) return std::nullopt;
      numbers.push_back(*number);
    }
    return numbers;
  }
  static std::string wanted(const std::string& name) { return wanted_by_name(name, false); }
};

template <>
struct Reader<std::array<int64_t, 2>> {
  static std::optional<std::array<int64_t, 2>> read(const py::handle& value) {
    if (!is_list(value) || PySequence_Size(value.ptr()) != 2) return std::nullopt;
    const auto pair = py::reinterpret_borrow<py::sequence>(value);
    const auto first = read_index(pair[0]), second = read_index(pair[1]);
    return first && second ? std::make_optional(std::array<int64_t, 2>{*first, *second}) : std::nullopt;
  }
  static std::string wanted(const std::string& name) { return wanted_by_name(name, false); }
};

template <>
struct Reader<std::shared_ptr<KVCache>> {
  static std::optional<std::shared_ptr<KVCache>> read(const py::handle& value);
  static std::string wanted(const std::string&) { return kLayerCacheDescription; }
};

template <>
struct Reader<std::shared_ptr<ModelCache>> {
  static std::optional<std::shared_ptr<ModelCache>> read(const py::handle& value);
  static std::string wanted(const std::string&) { return kModelCacheDescription; }
};

template <>
struct Reader<RotaryEmbedding> {
  static std::optional<RotaryEmbedding> read(const py::handle& value);
  static std::string wanted(const std::string&) {
    return "a RotaryEmbedding of attnpack.cpp, or None: .cpp() of a Python one gives it";
  }
};

// The value as a T, or a TypeError. `name`, of an argument of `function`, finds the words for the right kind;
// `shown_name` stands in the sentence.
template <typename T>
T read_value(std::string_view shown_name, const py::handle& value, std::string_view name,
             const char* function = nullptr) {
  if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>)
    check_not_nested(name, value);
  auto read = Reader<T>::read(value);
  if (!read) {
    const auto full_name = function ? text_of({function, ".", name}) : std::string(name);
    raise_wrong_kind(std::string(shown_name), value, Reader<T>::wanted(full_name));
  }
  return std::move(*read);
}

// Whether `names` has the name. No template: it stands for each option of all modules.
bool has_name(const Names& names, const char* name);

// The arguments of one call. Each is read once, and finish() refuses those that no read asked for.
class Arguments {
 public:
  // positional: the names of the arguments that may be given without their names.
  Arguments(const char* function, const Names& positional, const py::args& args, const py::kwargs& kwargs);

  // Reads the argument into value; leaves value as it is where the argument was not given, which `required` refuses.
  template <typename T>
  void read(const char* name, T& value, bool required = false) {
    if constexpr (std::is_same_v<T, Factory>) {
      value = take_factory();
    } else if constexpr (std::is_same_v<T, at::TensorOptions>) {
      value = take_factory().options();
    } else if (const auto given = take(name)) {
      value = read_value<T>(name, given, name);
    } else if (required) {
      raise_missing(name);
    }
  }
  // The argument as it was given, or an empty object.
  py::object take(const char* name);
  template <typename T>
  T require(const char* name) {
    const auto given = take(name);
    if (!given) raise_missing(name);
    return read_value<T>(name, given, name);
  }
  // Reads every option but `skipped` ones.
  template <typename Options>
  void read_options(Options& options, const Names& skipped = {}) {
    Options::for_each_option(options, [&](const char* name, auto& value) {
      if (!has_name(skipped, name)) read(name, value);
    });
  }
  // cache: the words that say what cache= takes, for an error about a keyword of another library.
  void finish(const std::string& cache = kLayerCacheDescription);

 private:
  [[noreturn]] void raise_missing(const char* name) const;
  Factory take_factory();  // device and dtype

  const char* function_;
  py::dict given_;
  std::vector<const char*> taken_;  // the names that the function has
};

// The names of the options, in their order.
template <typename Options>
Names option_names(const Options& options) {
  Names names;
  Options::for_each_option(options, [&](const char* name, const auto&) { names.emplace_back(name); });
  return names;
}

// Options from the arguments of a constructor. Sizes are the types of the arguments that Options' constructor takes,
// which are required as the keywords `required` are; `positional` says how many arguments may be given without their
// names, by default only the sizes.
template <typename Options, typename... Sizes>
Options options_of_call(const char* function, const py::args& args, const py::kwargs& kwargs,
                        size_t positional = sizeof...(Sizes), const Names& required = {}) {
  auto names = option_names(Options(Sizes{}...));
  Arguments arguments(function, Names(names.begin(), names.begin() + positional), args, kwargs);
  size_t i = 0;
  std::tuple<Sizes...> sizes{arguments.require<Sizes>(names[i++].c_str())...};  // in this order: braces
  auto options = std::make_from_tuple<Options>(std::move(sizes));
  i = 0;
  Options::for_each_option(options, [&](const char* name, auto& value) {
    if (i++ < sizeof...(Sizes)) return;
    arguments.read(name, value, has_name(required, name));
  });
  arguments.take("device"), arguments.take("dtype");  // every module accepts them
  arguments.finish();
  return options;
}

// The option named `key` of a dict that stands for Options, as Hugging Face configs have them; false if there is none.
// A value of None counts as left out. A bool is no number here.
template <typename Options>
bool read_item(const std::string& owner, const std::string& key, const py::handle& value, Options& options) {
  bool known = false;
  Options::for_each_option(options, [&](const char* name, auto& option) {
    using T = std::decay_t<decltype(option)>;
    if (key != name) return;
    known = true;
    if (value.is_none()) return;
    const auto full_name = owner + ": " + name;
    constexpr bool is_switch = std::is_same_v<T, bool> || std::is_same_v<T, std::optional<bool>>;
    if (is_switch != py::isinstance<py::bool_>(value)) raise_wrong_kind(full_name, value, Reader<T>::wanted(name));
    option = read_value<T>(full_name, value, name);
  });
  return known;
}

// Calls `call` without the GIL.
template <typename Call>
auto without_gil(const Call& call) {
  const py::gil_scoped_release released;
  return call();
}

// The result of a call as Python's object, None if it has none.
template <typename Call>
py::object object_of(const Call& call) {
  using Result = std::decay_t<decltype(call())>;
  if constexpr (std::is_void_v<Result>) {
    call();
    return py::none();
  } else if constexpr (std::is_base_of_v<py::object, Result>) {
    return call();
  } else {
    return py::cast(call());
  }
}

// The type that holds an argument of a function while the function runs.
template <typename T>
struct OwningType {
  using type = T;
};
template <typename T>
struct OwningType<c10::ArrayRef<T>> {
  using type = std::vector<T>;
};

// Adds a function that takes its arguments by place, without the pass over them that pybind makes (PERFORMANCE.md).
using PlainCall = std::function<py::object(PyObject* const* arguments, size_t count)>;
void add_plain_function(py::module_& m, const char* name, PlainCall call);

// Defines a function of the native side, which takes its arguments only by place: attnpack.ops gives them their names
// and defaults. It runs without the GIL unless it takes or gives Python's objects.
template <typename Result, typename... Values>
void define(py::module_& m, const char* name, Result (*function)(Values...), const Names& names) {
  TORCH_INTERNAL_ASSERT(names.size() == sizeof...(Values), name);
  constexpr bool needs_gil =
      (std::is_same_v<std::decay_t<Values>, py::object> || ... || std::is_same_v<Result, py::object>);
  add_plain_function(m, name, [=](PyObject* const* arguments, size_t count) -> py::object {
    ATTNPACK_CHECK_TYPE(count == names.size(), name, "() takes ", joined_by(", ", names));
    size_t i = 0;
    const auto read = [&](auto kind) {
      const auto at = i++;
      return read_value<typename decltype(kind)::type>(names[at], arguments[at], names[at], name);
    };
    std::tuple<typename OwningType<std::decay_t<Values>>::type...> values{
        read(OwningType<std::decay_t<Values>>())...};  // in this order
    const auto call = [&] { return std::apply(function, values); };
    if constexpr (needs_gil || std::is_void_v<Result>)
      return object_of(call);
    else
      return object_of([&] { return without_gil(call); });
  });
}

// Defines a function that Python calls by the names of its arguments, all of which it gives.
using NamedCall = std::function<py::object(Arguments& arguments)>;
void add_named_function(py::module_& m, const char* name, const Names& names, NamedCall call);
template <typename Result, typename... Values>
void define_by_name(py::module_& m, const char* name, Result (*function)(Values...), const Names& names) {
  TORCH_INTERNAL_ASSERT(names.size() == sizeof...(Values), name);
  add_named_function(m, name, names, [=](Arguments& arguments) {
    size_t i = 0;
    std::tuple<std::decay_t<Values>...> values{
        arguments.require<std::decay_t<Values>>(names[i++].c_str())...};  // in this order
    arguments.finish();
    return object_of([&] { return std::apply(function, values); });
  });
}

}  // namespace attnpack
