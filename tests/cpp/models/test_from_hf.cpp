// Whole models from a Hugging Face directory, and weights that travel through files.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"
#include "folder.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

const std::string kConfig =
    R"({"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0,
                            "original_max_position_embeddings": 32}})";

CausalLM random_model() {
  torch::manual_seed(0);
  return CausalLM(
      CausalLMOptions(32, 16, 2, 4)
          .num_kv_heads(2)
          .hidden_dim(24)
          .max_positions(64)
          .eps(1e-5)
          .rope_base(5000)
          .rope_scaling(RopeScaling().rope_type("llama3").factor(8.0).original_max_position_embeddings(32)));
}

// The model of a file of the base model: no head, and names without "model.".
CausalLM causal_lm_from_hf_without_head(const Folder& folder, const StateDict& tensors) {
  StateDict base;
  for (const auto& [name, tensor] : tensors)
    if (name != "lm_head.weight") base[name.substr(std::string("model.").size())] = tensor;
  save_safetensors(base, folder.path("model.safetensors"));
  return causal_lm_from_hf(folder.path("."));
}

std::string with(const std::string& settings) { return kConfig.substr(0, kConfig.size() - 1) + ", " + settings + "}"; }

}  // namespace

TEST_CASE("a checkpoint's model has its configuration and its weights") {
  const Folder folder;
  auto model = random_model();
  save_safetensors(state_dict(*model), folder.path("model.safetensors"));
  folder.write("config.json", kConfig);
  auto found = causal_lm_from_hf(folder.path("."));
  REQUIRE(!found->is_training());
  for (const auto& [name, tensor] : state_dict(*model)) REQUIRE(at::equal(state_dict(*found).at(name), tensor));
  for (const auto& parameter : found->parameters()) REQUIRE(parameter.requires_grad());
  const torch::NoGradGuard no_grad;
  const auto ids = torch::randint(32, {2, 50});
  REQUIRE(at::equal(found(ids), model(ids)));
  REQUIRE(at::equal(generate(*found, ids, GenerateOptions(5)), generate(*model, ids, GenerateOptions(5))));

  auto half = causal_lm_from_hf(folder.path("."), FromHfOptions().dtype(at::kBFloat16).max_positions(8));
  REQUIRE(half->options.max_positions() == 8);
  for (const auto& [name, tensor] : state_dict(*model))
    REQUIRE(at::equal(state_dict(*half).at(name), tensor.to(at::kBFloat16)));
}

TEST_CASE("a stored head that differs from a tied embedding is the head, and a file of the base model has none") {
  const Folder folder;
  auto model = random_model();
  auto tensors = state_dict(*model);
  save_safetensors(tensors, folder.path("model.safetensors"));
  folder.write("config.json", with(R"("tie_word_embeddings": true)"));
  const torch::NoGradGuard no_grad;
  const auto ids = torch::randint(32, {2, 5});
  REQUIRE(at::equal(causal_lm_from_hf(folder.path("."))(ids), model(ids)));

  const auto tied = causal_lm_from_hf_without_head(folder, tensors);
  REQUIRE(at::equal(state_dict(*tied).at("model.embed_tokens.weight"), tensors.at("model.embed_tokens.weight")));
  folder.write("config.json", kConfig);
  REQUIRE(complains("lacks lm_head.weight, as a file of the base model does, and its embedding is not tied",
                    [&] { causal_lm_from_hf(folder.path(".")); }));
}

TEST_CASE("what a checkpoint cannot be is named") {
  const Folder folder;
  const auto directory = folder.path("x");
  std::filesystem::create_directory(directory);
  const auto says = [&](const std::string& words) {
    return complains(directory + words, [&] { causal_lm_from_hf(directory); });
  };
  const auto configure = [&](const std::string& text) { folder.write("x/config.json", text); };
  REQUIRE(says(": has no config.json; give the directory of a Hugging Face checkpoint"));
  std::filesystem::create_directory(folder.path("x/config.json"));
  REQUIRE(says("/config.json: is a directory, wants a readable file with data: put one in its place"));
  std::filesystem::remove(folder.path("x/config.json"));
  configure(kConfig);
  REQUIRE(says(": has neither model.safetensors nor model.safetensors.index.json"));
  auto model = random_model();
  auto tensors = state_dict(*model);
  save_safetensors(tensors, folder.path("x/model.safetensors"));
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {R"("hidden_act": "gelu")", ": hidden_act 'gelu' in config.json is not supported; it must be 'silu'"},
      {R"("quantization_config": {"bits": 4})", ": quantization_config = {'bits': 4} in config.json is not supported"},
      {R"("is_causal": false)", ": is_causal = False in config.json is not supported yet"},
      {R"("head_dim": "4")", ": head_dim in config.json is '4', wants an int of at least 1"},
      {R"("attention_bias": true)", ": lacks model.layers.0.self_attn.k_proj.bias"},
      {R"("rope_scaling": {"rope_type": "yarn", "factor": "4"})",
       ": its configuration makes no model (scaling: factor is '4', wants a number); get it again"},
      {R"("rope_scaling": {"rope_type": "linear", "factor": 2})", ": rope_parameters and rope_scaling in config.json"},
  };
  for (const auto& [settings, words] : wrong) {
    INFO(settings);
    configure(with(settings));
    REQUIRE(says(words));
  }
  configure(R"({"model_type": "gemma9"})");
  REQUIRE(says(": model_type 'gemma9' is not supported; from_hf reads llama, mistral, qwen2, qwen3, gemma2"));
  configure("{");
  REQUIRE(says(
      "/config.json: cannot be read as JSON (parse error at line 1, column 2: syntax error while parsing object key - "
      "unexpected end of input; expected string literal); get"));
  configure(kConfig);
  tensors["model.norm.weight"] = torch::ones({15});
  save_safetensors(tensors, folder.path("x/model.safetensors"));
  REQUIRE(says(": model.norm.weight has shape [15], its configuration asks for [16]"));
  tensors.erase("model.norm.weight");
  tensors["extra"] = torch::ones({1});
  save_safetensors(tensors, folder.path("x/model.safetensors"));
  REQUIRE(says(": lacks model.norm.weight and has unexpected extra; its configuration asks for other tensors"));
  REQUIRE(complains("dtype is Int, wants a floating one",
                    [&] { causal_lm_from_hf(directory, FromHfOptions().dtype(at::kInt)); }));
}

TEST_CASE("a model trained here is the same after its file was read") {
  const Folder folder;
  auto model = random_model();
  torch::optim::SGD optimizer(distinct_parameters(*model), 0.1);
  const auto ids = torch::randint(32, {4, 12});
  const auto loss_of = [&](CausalLM& lm) {
    return torch::nn::functional::cross_entropy(lm(ids).slice(1, 0, 11).flatten(0, 1), ids.slice(1, 1).flatten());
  };
  const auto before = loss_of(model).item<double>();
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    loss_of(model).backward();
    optimizer.step();
  }
  const auto after = loss_of(model).item<double>();
  REQUIRE(after < before);
  save_safetensors(state_dict(*model), folder.path("x.safetensors"));
  auto copy = CausalLM(model->options);
  const auto report = load_state_dict(*copy, load_safetensors(folder.path("x.safetensors")));
  REQUIRE((report.missing.empty() && report.unexpected.empty()));
  REQUIRE(loss_of(copy).item<double>() == after);
}

}  // namespace attnpack
