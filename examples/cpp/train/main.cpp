// Trains a small language model in C++ without Python, and writes it as a Hugging Face directory:
//
//   train DIRECTORY
//
// The model learns to count on: in each sequence the tokens grow by the same step, modulo the vocabulary. Python opens
// what this writes: attnpack.CausalLM.from_hf(DIRECTORY).
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/state_dict.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

namespace {

constexpr int64_t kVocabulary = 20, kLength = 16, kWidth = 64, kHidden = 128, kLayers = 2, kHeads = 4, kKvHeads = 2;

// config.json for this model: Llama's layers, with names and keys of Hugging Face.
void write_config(const std::string& path) {
  std::ofstream(path) << "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"vocab_size\": "
                      << kVocabulary << ", \"hidden_size\": " << kWidth << ", \"intermediate_size\": " << kHidden
                      << ", \"num_hidden_layers\": " << kLayers << ", \"num_attention_heads\": " << kHeads
                      << ", \"num_key_value_heads\": " << kKvHeads << ", \"max_position_embeddings\": " << kLength
                      << ", \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\", \"tie_word_embeddings\": true}\n";
}

// Sequences of `batch` starts and steps, [batch, kLength].
at::Tensor draw(int64_t batch) {
  const auto start = at::randint(kVocabulary, {batch, 1}, at::kLong), step = at::randint(1, 4, {batch, 1}, at::kLong);
  return (start + step * at::arange(kLength)).remainder(kVocabulary);
}

// The loss of predicting each token from those before it, without the first two, which nothing determines.
at::Tensor loss_of(attnpack::CausalLM& model, const at::Tensor& ids) {
  const auto logits = model(ids).slice(1, 1, kLength - 1);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.slice(1, 2).flatten());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || !std::filesystem::is_directory(argv[1])) {
    std::cerr << "train DIRECTORY, one that exists\n";
    return 2;
  }
  const std::string directory = argv[1];
  torch::manual_seed(0);
  attnpack::CausalLM model(attnpack::CausalLMOptions(kVocabulary, kWidth, kLayers, kHeads)
                               .num_kv_heads(kKvHeads)
                               .hidden_dim(kHidden)
                               .max_positions(kLength)
                               .tie_embeddings(true));
  torch::optim::Adam optimizer(attnpack::distinct_parameters(*model), torch::optim::AdamOptions(3e-3));
  for (int step = 0; step <= 200; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(model, draw(32));
    loss.backward();
    optimizer.step();
    if (step % 50 == 0) std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
  }
  model->eval();
  try {
    attnpack::save_safetensors(attnpack::state_dict(*model), directory + "/model.safetensors");
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  }
  write_config(directory + "/config.json");
}
