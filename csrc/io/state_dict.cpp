#include <attnpack/io/state_dict.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/leaf.h>

namespace attnpack {

namespace {

// Which names the module lacks and which it does not know; raises on shapes, and on names where strict.
LoadResult compare(const StateDict& own, const StateDict& given, bool strict) {
  LoadResult result;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      result.missing.push_back(name);
      continue;
    }
    ATTNPACK_CHECK(found->second.sizes() == tensor.sizes(), "state dict: got ", name, " of shape ",
                   found->second.sizes(), ", want ", tensor.sizes());
  }
  for (const auto& [name, tensor] : given) {
    if (!own.count(name)) result.unexpected.push_back(name);
  }
  ATTNPACK_CHECK(!strict || (result.missing.empty() && result.unexpected.empty()), "state dict: missing ",
                 result.missing, ", unexpected ", result.unexpected,
                 "; want exactly the module's names (or strict=false)");
  return result;
}

// The module that owns "a.b.weight" (here a.b) and the last part of the name.
std::pair<ParameterOwner*, std::string> owner_of(
    const torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>& modules, const std::string& name) {
  const auto dot = name.rfind('.');
  const auto* found = modules.find(dot == std::string::npos ? "" : name.substr(0, dot));
  auto* owner = found ? dynamic_cast<ParameterOwner*>(found->get()) : nullptr;
  ATTNPACK_CHECK(owner, "state dict: ", name, " belongs to a module that is not attnpack's; use load_state_dict");
  return {owner, dot == std::string::npos ? name : name.substr(dot + 1)};
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) tensors[item.key()] = item.value();
  return tensors;
}

LoadResult load_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict) {
  at::NoGradGuard no_grad;
  const auto own = state_dict(module);
  const auto result = compare(own, tensors, strict);
  for (const auto& [name, tensor] : own) {
    if (const auto found = tensors.find(name); found != tensors.end()) tensor.copy_(found->second);
  }
  return result;
}

LoadResult assign_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict) {
  const auto own = state_dict(module);
  const auto result = compare(own, tensors, strict);
  const auto modules = module.named_modules();
  std::vector<std::pair<ParameterOwner*, std::string>> owners;
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tensors) {
    if (!own.count(name)) continue;
    owners.push_back(owner_of(modules, name));
    values.push_back(tensor);
  }
  for (size_t i = 0; i < owners.size(); ++i) owners[i].first->assign_parameter(owners[i].second, values[i]);
  return result;
}

}  // namespace attnpack
