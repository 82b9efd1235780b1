// The lines of the notebook on multi-query attention, from C++: V1 without cache and mask, V2 with a cache, V3 with a
// cache and a causal mask, then the mask itself. With the same seed they are those of `attnpack demo --all-lines`.
#include <attnpack/cache/dynamic_cache.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/state_dict.h>
#include <attnpack/ops/attention.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int64_t kBatch = 2, kLength = 10, kWidth = 64, kHeads = 8;

// A shape as Python prints it: torch.Size([2, 10, 64])
std::string shape(const at::Tensor& x) {
  std::string text = "torch.Size([";
  for (const auto size : x.sizes()) text += (text.back() == '[' ? "" : ", ") + std::to_string(size);
  return text + "])";
}

std::string number(const at::Tensor& x) {
  if (x.scalar_type() == at::kBool) return x.item<bool>() ? "True" : "False";
  const auto value = x.item<double>();
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

size_t widest(const at::Tensor& x) {
  size_t width = 0;
  for (const auto& each : x.flatten().unbind()) width = std::max(width, number(each).size());
  return width;
}

// The numbers of x in brackets, as Python prints them: `indent` columns stand before the first bracket, and lines have
// up to 80 columns.
std::string rows(const at::Tensor& x, size_t indent, size_t width) {
  std::string text = "[";
  const auto spaces = std::string(indent + 1, ' ');
  if (x.dim() > 1) {
    for (int64_t i = 0; i < x.size(0); ++i) {
      if (i > 0) text += "," + std::string(x.dim() - 1, '\n') + spaces;
      text += rows(x[i], indent + 1, width);
    }
    return text + "]";
  }
  const auto per_line = std::max<int64_t>(1, (80 - static_cast<int64_t>(indent)) / static_cast<int64_t>(width + 2));
  for (int64_t i = 0; i < x.size(0); ++i) {
    const auto each = number(x[i]);
    if (i > 0) text += i % per_line ? ", " : ",\n" + spaces;
    text += std::string(width - each.size(), ' ') + each;
  }
  return text + "]";
}

std::string as_text(const at::Tensor& x) { return "tensor(" + rows(x, 7, widest(x)) + ")"; }

// One token at a time through a module with a cache.
void run_steps(attnpack::MultiQueryAttention& module, const at::Tensor& x) {
  std::cout << "x.shape : " << shape(x) << "\n";
  const auto cache = std::make_shared<attnpack::DynamicCache>();
  for (const auto& token : x.split(1, 1)) {
    const auto q = std::get<0>(module->project(token));
    const auto out = module->forward(token, attnpack::AttentionInputs().cache(cache));
    std::cout << "\n--------------------\nQ shape : " << shape(q) << "\nK.shape: " << shape(cache->k())
              << "\nV.shape: " << shape(cache->v()) << "\nshape of out : " << shape(out) << "\n";
  }
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  attnpack::MultiQueryAttention plain(attnpack::MultiQueryAttentionOptions(kWidth, kHeads));
  const auto x = at::randn({kBatch, kLength, kWidth});
  const auto square = at::randn({2, 1, 1, 5, kWidth / kHeads}).unbind(0);

  // V1: the whole sequence at once.
  std::cout << "x.shape : " << shape(x) << "\n";
  const auto [q, k, v] = plain->project(x);
  std::cout << "should be 1 if correct: " << as_text(attnpack::attention_scores(q, k).sum(-1)) << "\n";
  std::cout << "shape of out : " << shape(plain->forward(x)) << "\n";

  // V2 and V3: step by step. A step of one token needs no mask, so both print the same shapes.
  run_steps(plain, x);
  attnpack::MultiQueryAttention causal(attnpack::MultiQueryAttentionOptions(kWidth, kHeads).causal(true));
  attnpack::load_state_dict(*causal, attnpack::state_dict(*plain));
  run_steps(causal, x);

  // The mask: scores, hidden keys, scores with the hidden ones at -inf.
  const auto scaled = attnpack::attention_scores(square[0], square[1], {}, "scaled");
  const auto masked =
      attnpack::attention_scores(square[0], square[1], attnpack::AttentionOptions().causal(true), "masked");
  std::cout << as_text(scaled[0][0]) << "\n\n"
            << as_text(masked[0][0].isneginf()) << "\n\n"
            << as_text(masked[0][0]) << "\n";
}
