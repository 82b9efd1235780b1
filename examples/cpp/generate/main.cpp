// Continues token ids with the language model of a Hugging Face directory (config.json and safetensors), or of a GGUF
// file, whose quantised weights stay as they are:
//
//   generate DIRECTORY|FILE.gguf MAX_NEW_TOKENS ID [ID ...]
//
// prints the prompt and the new ids. attnpack has no tokenizer in C++. tokenizers-cpp reads a tokenizer.json, and
// SentencePiece a tokenizer.model. In Python `attnpack.checkpoints.load_tokenizer(PATH)` gives ids and text.
#include <attnpack/models/from_gguf.h>
#include <attnpack/models/from_hf.h>
#include <attnpack/models/generate.h>

#include <chrono>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

attnpack::CausalLM load(const std::string& path) {
  if (path.ends_with(".gguf")) return attnpack::causal_lm_from_gguf(path, attnpack::GgufOptions().weights("stored"));
  return attnpack::causal_lm_from_hf(path);
}

void generate(const std::string& path, int64_t max_new_tokens, const std::vector<int64_t>& prompt) {
  const torch::NoGradGuard no_grad;
  auto model = load(path);
  const auto ids = at::tensor(prompt, at::kLong).unsqueeze(0);  // [1, L]

  const auto begin = std::chrono::steady_clock::now();
  const auto tokens = attnpack::generate(*model, ids, attnpack::GenerateOptions(max_new_tokens));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;

  for (int64_t i = 0; i < tokens.size(1); ++i) std::cout << tokens[0][i].item<int64_t>() << " ";
  std::cout << "\n";
  std::cerr << (tokens.size(1) - ids.size(1)) / seconds.count() << " tokens per second\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "generate DIRECTORY|FILE.gguf MAX_NEW_TOKENS ID [ID ...]\n";
    return 2;
  }
  try {
    std::vector<int64_t> prompt;
    for (int i = 3; i < argc; ++i) prompt.push_back(std::stoll(argv[i]));
    generate(argv[1], std::stoll(argv[2]), prompt);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";  // one sentence
    return 1;
  } catch (const std::logic_error&) {  // of stoll
    std::cerr << "generate: MAX_NEW_TOKENS and each ID are whole numbers\n";
    return 2;
  }
}
