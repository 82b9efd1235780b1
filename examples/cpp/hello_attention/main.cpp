// A grouped-query attention layer, the operator beneath it, and the same operator found by name.
#include <attnpack/attnpack.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>

int main() {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;

  // A layer: 8 query heads share 2 key-value heads.
  auto layer = attnpack::GroupedQueryAttention(attnpack::GroupedQueryAttentionOptions(512, 8, 2).causal(true));
  const auto x = torch::randn({1, 10, 512});
  const auto out = layer->forward(x);
  std::cout << "layer     " << out.sizes() << "\n";

  // Token by token with a cache: the same values.
  auto cache = std::make_shared<attnpack::DynamicCache>();
  std::vector<torch::Tensor> steps;
  for (const auto& token : x.split(1, 1))
    steps.push_back(layer->forward(token, attnpack::AttentionInputs().cache(cache)));
  const bool same = torch::allclose(torch::cat(steps, 1), out, 1e-4, 1e-5);
  std::cout << "steps     " << (same ? "agree with the whole sequence" : "differ from the whole sequence") << "\n";

  // The operator itself.
  const auto q = torch::randn({1, 8, 10, 64}), k = torch::randn({1, 2, 10, 64}), v = torch::randn({1, 2, 10, 64});
  std::cout << "operator  " << attnpack::attention(q, k, v, attnpack::AttentionOptions().causal(true)).sizes() << "\n";
  std::cout << "schema    " << c10::Dispatcher::singleton().findSchemaOrThrow("attnpack::attention", "").schema()
            << "\n";
  return same ? 0 : 1;
}
