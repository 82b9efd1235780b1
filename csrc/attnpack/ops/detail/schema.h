#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <attnpack/core/padded.h>
#include <attnpack/ops/score_rules.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

// The dispatcher knows flat signatures; our functions take structs of arguments. A struct of arguments is an aggregate
// with `members()`: a tie of its members, in the order of the schema.
namespace attnpack {

template <class T>
concept ArgumentStruct = requires(const std::remove_cvref_t<T>& t) { t.members(); };

namespace detail {

template <class... T>
struct Types {};

// A member's type in a flat signature.
template <class T>
struct ParameterOf {
  using type =
      std::conditional_t<std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>, const T&, T>;
};
template <>
struct ParameterOf<HeadMap> {
  using type = at::OptionalIntArrayRef;
};
template <class T>
using Parameter = typename ParameterOf<T>::type;

// A member as a flat argument, and the reverse.
template <class T>
const T& to_flat(const T& member) {
  return member;
}
inline at::OptionalIntArrayRef to_flat(const HeadMap& map) {
  return map ? at::OptionalIntArrayRef(*map) : at::OptionalIntArrayRef();
}
template <class T, class F>
void from_flat(T& member, const F& flat) {
  if constexpr (std::is_same_v<T, HeadMap>)
    member = flat ? HeadMap(flat->vec()) : HeadMap();
  else
    member = flat;
}
// The members of a struct of ours, to be written: members() gives constant references.
template <class T>
T& writable(const T& member) {
  return const_cast<T&>(member);
}

template <class T>
struct Flat {
  using type = Types<T>;
};
template <class Tie>
struct FlatMembers;
template <class... Member>
struct FlatMembers<std::tuple<const Member&...>> {
  using type = Types<Parameter<Member>...>;
};
template <ArgumentStruct T>
struct Flat<T> : FlatMembers<decltype(std::declval<const std::remove_cvref_t<T>&>().members())> {};

template <class... Lists>
struct Join;
template <class... A>
struct Join<Types<A...>> {
  using type = Types<A...>;
};
template <class... A, class... B, class... Rest>
struct Join<Types<A...>, Types<B...>, Rest...> : Join<Types<A..., B...>, Rest...> {};

template <class... Arguments>
using FlatList = typename Join<Types<>, typename Flat<Arguments>::type...>::type;

template <class T>
constexpr size_t kWidth = [] {
  if constexpr (ArgumentStruct<T>)
    return std::tuple_size_v<decltype(std::declval<const std::remove_cvref_t<T>&>().members())>;
  else
    return size_t{1};
}();

// Flat argument `index` as the member of an argument.
struct MemberPlace {
  size_t argument, member;
};
template <class... Argument>
constexpr MemberPlace member_place(size_t index) {
  constexpr size_t widths[] = {kWidth<Argument>...};
  size_t argument = 0;
  for (; index >= widths[argument]; ++argument) index -= widths[argument];
  return {argument, index};
}

// The argument of type T that begins at element `Begin` of the flat ones.
template <class T, size_t Begin, class Tuple>
decltype(auto) take_argument(const Tuple& flat) {
  if constexpr (ArgumentStruct<T>)
    return [&]<size_t... I>(std::index_sequence<I...>) {
      std::remove_cvref_t<T> argument;
      const auto members = std::as_const(argument).members();
      (from_flat(writable(std::get<I>(members)), std::get<Begin + I>(flat)), ...);
      return argument;
    }(std::make_index_sequence<kWidth<T>>());
  else
    return std::get<Begin>(flat);
}

// An argument as one or several flat ones.
template <class T>
auto flat_argument(const T& argument) {
  if constexpr (ArgumentStruct<T>)
    return argument.members();
  else
    return std::tie(argument);
}

// Raise for an undefined tensor in argument `index`. The dispatcher itself would raise without the argument's name, or
// give kernels a tensor without a shape.
[[gnu::cold]] void refuse_undefined(const c10::OperatorHandle& op, size_t index);
[[gnu::cold]] void refuse_undefined(const c10::OperatorHandle& op, size_t index, size_t element);

template <class T>
void check_flat_argument(const c10::OperatorHandle& op, size_t index, const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (!argument.defined()) [[unlikely]]
      refuse_undefined(op, index);
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (argument && !argument->defined()) [[unlikely]]
      refuse_undefined(op, index);
  } else if constexpr (std::is_same_v<T, at::TensorList>) {
    for (size_t i = 0; i < argument.size(); ++i) {
      if (!argument[i].defined()) [[unlikely]]
        refuse_undefined(op, index, i);
    }
  }
}

// A function over structs as a functor over flat arguments. Its type is that of the signature, not of the function: the
// functions that serve an op for several dispatch keys share what torch makes of it, which takes the compiler long.
template <class Result, class Arguments, class Flat>
class FlatFunction;
template <class Result, class... Argument, class... F>
class FlatFunction<Result, Types<Argument...>, Types<F...>> {
 public:
  explicit constexpr FlatFunction(Result (*function)(Argument...)) : function_(function) {}
  Result operator()(F... flat) const {
    return call_with_structs(std::tie(flat...), std::index_sequence_for<Argument...>());
  }

 private:
  template <class Tuple, size_t... I>
  Result call_with_structs(const Tuple& flat, std::index_sequence<I...>) const {
    constexpr auto begin = [](size_t argument) {
      constexpr size_t widths[] = {kWidth<Argument>...};
      size_t sum = 0;
      for (size_t i = 0; i < argument; ++i) sum += widths[i];
      return sum;
    };
    return function_(take_argument<Argument, begin(I)>(flat)...);
  }

  Result (*function_)(Argument...);
};

template <class Result, class... Argument>
constexpr auto flat_function(Result (*function)(Argument...)) {
  return FlatFunction<Result, Types<Argument...>, FlatList<Argument...>>(function);
}

template <class Result, class List>
struct FlatSignature;
template <class Result, class... F>
struct FlatSignature<Result, Types<F...>> {
  using type = Result(F...);
};

}  // namespace detail

// A function over structs as the dispatcher calls it: m.impl("op", from_schema<function>).
template <auto Function>
constexpr auto from_schema = detail::flat_function(Function);

// An op of ours by its name, called through the dispatcher with structs. It raises for an undefined tensor, and names
// the argument. Make it static, because the constructor looks
// the name up.
template <class Signature>
class DispatchedOp;
template <class Result, class... Argument>
class DispatchedOp<Result(Argument...)> {
 public:
  explicit DispatchedOp(const char* name)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>()) {}

  Result operator()(const Argument&... arguments) const {
    return call(std::make_tuple(detail::flat_argument(arguments)...),
                std::make_index_sequence<(detail::kWidth<Argument> + ...)>());
  }

 private:
  using Signature = typename detail::FlatSignature<Result, detail::FlatList<Argument...>>::type;

  template <class Tuples, size_t... I>
  Result call(const Tuples& arguments, std::index_sequence<I...>) const {
    (detail::check_flat_argument(op_, I, flat<I>(arguments)), ...);
    return op_.call(detail::to_flat(flat<I>(arguments))...);
  }
  template <size_t I, class Tuples>
  static const auto& flat(const Tuples& arguments) {
    constexpr auto place = detail::member_place<Argument...>(I);
    return std::get<place.member>(std::get<place.argument>(arguments));
  }

  c10::TypedOperatorHandle<Signature> op_;
};

}  // namespace attnpack
