// Several threads answer requests with one model: serve_threads [DIRECTORY]
//
// A forward changes nothing of a model, so threads share it. Each request has a cache of its own, with pages of 16
// positions. Without the directory of a checkpoint, a small model with random weights serves.
#include <attnpack/cache/paged_cache.h>
#include <attnpack/models/from_hf.h>
#include <attnpack/models/generate.h>

#include <ATen/Parallel.h>

#include <atomic>
#include <iostream>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kRequests = 12, kThreads = 3, kPrompt = 10, kNew = 20;

attnpack::CausalLM make_model(int argc, char** argv) {
  if (argc > 1) return attnpack::causal_lm_from_hf(argv[1]);
  torch::manual_seed(0);
  attnpack::CausalLM model(attnpack::CausalLMOptions(96, 64, 2, 4).num_kv_heads(2).init_std(1.0));
  model->eval();
  return model;
}

// Prompt and new tokens, [1, kPrompt + kNew].
at::Tensor answer(attnpack::CausalLM& model, const at::Tensor& prompt) {
  const torch::NoGradGuard no_grad;  // this thread's own
  const auto cache = model->paged_cache(1, (kPrompt + kNew + 15) / 16);
  return attnpack::generate(*model, prompt, attnpack::GenerateOptions(kNew).model_cache(cache));
}

int serve(attnpack::CausalLM model) {
  at::set_num_threads(1);  // the requests run beside each other, not the parts of one
  std::vector<at::Tensor> prompts, answers(kRequests);
  for (int64_t i = 0; i < kRequests; ++i)
    prompts.push_back(at::randint(model->options.vocab_size(), {1, kPrompt}, at::kLong));

  std::atomic<int64_t> next = 0;
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int64_t request = next++; request < kRequests; request = next++)
        answers[request] = answer(model, prompts[request]);
    });
  }
  for (auto& thread : threads) thread.join();

  int64_t same = 0;
  for (int64_t i = 0; i < kRequests; ++i) same += at::equal(answers[i], answer(model, prompts[i]));
  std::cout << kRequests << " requests, " << kThreads << " threads, " << same << " answers as from one thread\n";
  return same == kRequests ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto model = make_model(argc, argv);
    model->paged_cache(1, 1);  // an error of a thread would end the program, so the model is asked here
    return serve(model);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";  // one sentence
    return 1;
  }
}
