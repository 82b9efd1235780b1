#include <attnpack/modules/state_dict.h>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include <attnpack/core/check.h>
#include <attnpack/modules/leaf.h>
#include <attnpack/ops/stored_linear.h>

namespace attnpack {

namespace {

// Checks that `given` can replace `current`.
void check_tensor(const std::string& name, const at::Tensor& current, const at::Tensor& given, bool taken) {
  ATTNPACK_CHECK(given.defined(), "state dict: got an undefined tensor as ", name, ", want one of shape ",
                 current.sizes(), ": leave the name out");
  ATTNPACK_CHECK(taken || given.sizes() == current.sizes(), "state dict: got ", name, " of shape ", given.sizes(),
                 ", want ", current.sizes(),
                 is_stored(given) && !is_stored(current)
                     ? ", or the same weight in stored blocks, by assign_state_dict (in Python assign=True)"
                     : "");
  ATTNPACK_CHECK(!given.is_complex() || current.is_complex(), "state dict: got ", name, " of dtype ",
                 given.scalar_type(), ", want real numbers: at::real and at::imag give the two parts");
  ATTNPACK_CHECK(!given.is_quantized(), "state dict: got ", name, " of dtype ", given.scalar_type(),
                 ", want plain numbers: call .dequantize() on it");
  ATTNPACK_CHECK(given.layout() == at::kStrided, "state dict: got ", name, " in layout ", given.layout(),
                 ", want a dense tensor: call .to_dense() on it");
}

// "missing a, b": nothing where there are no names.
std::string listed(const char* what, const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? what + std::string(" ") : ", ") + name;
  return text;
}

// Finds the names that the module lacks and the names that it does not know. Raises on tensors that do not fit, unless
// `takes` their owners take them, and with strict on such names.
template <class Takes>
LoadResult compare(const StateDict& current, const StateDict& given, bool strict, const Takes& takes) {
  LoadResult result;
  for (const auto& [name, tensor] : current) {
    const auto found = given.find(name);
    if (found == given.end()) {
      result.missing.push_back(name);
    } else {
      check_tensor(name, tensor, found->second, takes(name, found->second));
    }
  }
  for (const auto& [name, tensor] : given) {
    if (!current.count(name)) result.unexpected.push_back(name);
  }
  const std::string missing = listed("missing", result.missing), unexpected = listed("unexpected", result.unexpected);
  ATTNPACK_CHECK(!strict || (missing.empty() && unexpected.empty()), "state dict: ", missing,
                 missing.empty() || unexpected.empty() ? "" : "; ", unexpected,
                 "; want exactly the module's names (or strict=false)");
  return result;
}

// The memory that a tensor's storage takes; none where it has no storage.
struct Memory {
  const char *begin = nullptr, *end = nullptr;

  explicit Memory(const at::Tensor& x) {
    if (!x.has_storage()) return;
    begin = static_cast<const char*>(x.storage().data());
    end = begin + x.storage().nbytes();
  }
  bool overlaps(const Memory& other) const { return begin < other.end && other.begin < end; }
};

// Whether a write to any of the module's tensors may change x.
bool shares_memory(const at::Tensor& x, const StateDict& current) {
  return std::any_of(current.begin(), current.end(),
                     [memory = Memory(x)](const auto& item) { return memory.overlaps(Memory(item.second)); });
}

void check_distinct_elements(const std::string& name, const at::Tensor& x, const char* whose) {
  ATTNPACK_CHECK(at::has_internal_overlap(x) != at::MemOverlap::Yes, "state dict: ", whose, name, " has strides ",
                 x.strides(), " for shape ", x.sizes(),
                 ", want memory of its own for each element: call .contiguous() on what was expanded");
}

// A tensor that copy_ into `current` cannot fail for, and that no write to the module changes. Plain numbers in memory
// of their own stay as they are. Anything else is copied here, where nothing has been written yet.
at::Tensor readable(const std::string& name, const at::Tensor& current, const at::Tensor& given, const StateDict& all) {
  ATTNPACK_CHECK(!given.is_meta(), "state dict: got ", name, " on meta, where a tensor has no numbers, want it on ",
                 current.device(), ": read it first");
  ATTNPACK_CHECK(!current.is_meta(), "state dict: the module's ", name,
                 " is on meta, where nothing can be copied to: use assign_state_dict");
  check_distinct_elements(name, current, "the module's ");
  const bool plain = !at::isTensorSubclassLike(given) && (given.is_same(current) || !shares_memory(given, all));
  return plain ? given : at::empty_like(current).copy_(given);
}

// The tensor itself if it requires a gradient where it shall, else a tensor on its storage.
at::Tensor assignable(const std::string& name, const at::Tensor& current, const at::Tensor& given, bool learns) {
  ATTNPACK_CHECK(given.is_floating_point() || !current.is_floating_point() || is_stored(given), "state dict: got ",
                 name, " of dtype ", given.scalar_type(), ", want a floating one as ", current.scalar_type(),
                 ": convert it with .to()");
  check_distinct_elements(name, given, "the given ");
  if (is_stored(given)) return given;
  return given.requires_grad() == learns ? given : given.detach().requires_grad_(learns);
}

using Modules = torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>;

// The module that owns "a.b.weight" (here a.b), or none if it is not attnpack's; and the last part of the name.
std::pair<ParameterOwner*, std::string> owner_of(const Modules& modules, const std::string& name) {
  const auto dot = name.rfind('.');
  const auto* found = modules.find(dot == std::string::npos ? "" : name.substr(0, dot));
  return {found ? dynamic_cast<ParameterOwner*>(found->get()) : nullptr,
          dot == std::string::npos ? name : name.substr(dot + 1)};
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) tensors[item.key()] = item.value();
  return tensors;
}

std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> distinct;
  std::set<const at::TensorImpl*> seen;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) distinct.push_back(parameter);
  }
  return distinct;
}

void tie_as(const torch::nn::Module& original, torch::nn::Module& copy) {
  const auto copies = copy.named_parameters();
  const auto modules = copy.named_modules();
  std::map<const at::TensorImpl*, std::string> first;  // where each tensor of the original stands first
  for (const auto& item : original.named_parameters()) {
    const auto [place, is_new] = first.emplace(item.value().unsafeGetTensorImpl(), item.key());
    const auto [owner, name] = owner_of(modules, item.key());
    if (!is_new && owner) owner->assign_parameter(name, copies[place->second]);
  }
}

void copy_requires_grad(const torch::nn::Module& from, torch::nn::Module& to) {
  const auto before = from.named_parameters();
  for (auto& item : to.named_parameters()) {
    if (const auto* old = before.find(item.key())) item.value().set_requires_grad(old->requires_grad());
  }
}

LoadResult load_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict) {
  at::NoGradGuard no_grad;
  const auto current = state_dict(module);
  const auto result = compare(current, tensors, strict, [](const std::string&, const at::Tensor&) { return false; });
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& [name, tensor] : current) {
    if (const auto found = tensors.find(name); found != tensors.end())
      copies.emplace_back(tensor, readable(name, tensor, found->second, current));
  }
  for (const auto& [tensor, given] : copies) tensor.copy_(given);
  return result;
}

LoadResult assign_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict) {
  const auto current = state_dict(module);
  const auto modules = module.named_modules();
  const auto result = compare(current, tensors, strict, [&](const std::string& name, const at::Tensor& given) {
    const auto [owner, parameter] = owner_of(modules, name);
    return owner && given.defined() && owner->takes(parameter, given);
  });
  // Layers of stored weights have no gradient, so a module that gets the first ones is frozen.
  const bool freezes = std::any_of(tensors.begin(), tensors.end(), [&](const auto& item) {
    const auto replaced = current.find(item.first);
    return replaced != current.end() && is_stored(item.second) && !is_stored(replaced->second);
  });
  struct Place {
    ParameterOwner* owner;
    std::string name;
    const c10::TensorImpl* replaced;
  };
  std::vector<Place> places;
  std::unordered_map<const c10::TensorImpl*, at::Tensor>
      values;  // by what they replace: one tensor may have several places
  for (const auto& [name, tensor] : tensors) {
    const auto found = current.find(name);
    if (found == current.end()) continue;
    const auto [owner, parameter] = owner_of(modules, name);
    ATTNPACK_CHECK(owner, "state dict: ", name, " belongs to a module that is not attnpack's; use load_state_dict");
    places.push_back({owner, parameter, found->second.unsafeGetTensorImpl()});
    const bool learns = found->second.requires_grad() && !freezes;
    values[places.back().replaced] = assignable(name, found->second, tensor, learns);
  }
  for (const auto& place : places) place.owner->assign_parameter(place.name, values.at(place.replaced));
  if (freezes)  // those that were not given too
    for (auto& parameter : module.parameters()) parameter.set_requires_grad(false);
  return result;
}

}  // namespace attnpack
