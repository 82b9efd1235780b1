#pragma once

#include <attnpack/models/generate.h>

#include <functional>
#include <optional>

namespace attnpack {

// A model that the caller steps, over a cache of the caller's: in Python, one that several processes share.
struct GenerateSteps {
  // The states of new ids [B, L], which come after all ids before: [B, L, E]. lengths [B]: the valid tokens of
  // right-padded ids.
  std::function<at::Tensor(const at::Tensor& ids, const std::optional<at::Tensor>& lengths)> states;
  std::function<at::Tensor(const at::Tensor&)> head;         // [B, E] -> logits [B, V]
  std::function<void(const at::Tensor& index)> pick_rows;    // from now on sequence i is what index[i] was
  std::function<at::Tensor(const at::Tensor&)> agreed = {};  // the tokens [B] of the process that chooses
};

// The loop of generate. The options' cache does not count.
at::Tensor generate(const GenerateSteps& steps, const at::Tensor& prompt, const GenerateOptions& options);

}  // namespace attnpack
