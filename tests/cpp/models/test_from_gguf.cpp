// Whole models from a GGUF file.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"
#include "folder.h"
#include "gguf_bytes.h"
#include "grouped_numbers.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

constexpr int64_t kTinyVocab = 40, kTinyWidth = 64, kTinyHeads = 4, kTinyKvHeads = 2, kTinyHeadDim = 16,
                  kTinyHidden = 96;
constexpr uint32_t kTinyQ8 = 8;  // ggml_type of Q8_0

CausalLM random_llama() {
  torch::manual_seed(0);
  return CausalLM(CausalLMOptions(kTinyVocab, kTinyWidth, 2, kTinyHeads)
                      .num_kv_heads(kTinyKvHeads)
                      .hidden_dim(kTinyHidden)
                      .max_positions(48)
                      .eps(1e-5)
                      .tie_embeddings(true));
}

std::string name_in_file(const std::string& name) {
  static const std::map<std::string, std::string> names{
      {"input_layernorm", "attn_norm"}, {"post_attention_layernorm", "ffn_norm"},
      {"self_attn.q_proj", "attn_q"},   {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},   {"self_attn.o_proj", "attn_output"},
      {"mlp.gate_proj", "ffn_gate"},    {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"}};
  if (name == "model.embed_tokens.weight") return "token_embd.weight";
  if (name == "model.norm.weight") return "output_norm.weight";
  const std::string layers = "model.layers.", ending = ".weight";
  const auto dot = name.find('.', layers.size());
  const auto layer = name.substr(layers.size(), dot - layers.size());
  return "blk." + layer + "." + names.at(name.substr(dot + 1, name.size() - ending.size() - dot - 1)) + ending;
}

// The rows of each head as pairs (2i, 2i + 1), where the state dict has (i, i + head_dim / 2).
at::Tensor as_pairs(const at::Tensor& weight, int64_t heads) {
  return weight.view({heads, 2, kTinyHeadDim / 2, -1}).transpose(1, 2).reshape(weight.sizes());
}

// The file of a model, as numbers or with its matrices in Q8_0. `fused`: layer 1 has its projections a second time, in
// one tensor.
std::string file_of(const CausalLM& model, bool in_blocks, const char* architecture = "llama", bool fused = false) {
  GgufBytes file;
  const std::string prefix = std::string(architecture) + ".";
  file.add("general.architecture", architecture)
      .add(prefix + "embedding_length", uint32_t{kTinyWidth})
      .add(prefix + "block_count", 2u)
      .add(prefix + "feed_forward_length", uint32_t{kTinyHidden})
      .add(prefix + "context_length", 48u)
      .add(prefix + "attention.head_count", uint32_t{kTinyHeads})
      .add(prefix + "attention.head_count_kv", uint32_t{kTinyKvHeads})
      .add(prefix + "attention.layer_norm_rms_epsilon", 1e-5f);
  for (const auto& [name, tensor] : state_dict(*model)) {
    auto numbers = tensor.detach();
    if (name.find("q_proj") != name.npos) numbers = as_pairs(numbers, kTinyHeads);
    if (name.find("k_proj") != name.npos) numbers = as_pairs(numbers, kTinyKvHeads);
    if (in_blocks && numbers.dim() == 2) {
      const auto blocks = to_stored(numbers, 8).contiguous();
      file.add_tensor(name_in_file(name), numbers.sizes().vec(), kTinyQ8,
                      {static_cast<const char*>(blocks.data_ptr()), blocks.nbytes()});
    } else {
      file.add_tensor(name_in_file(name), numbers);
    }
  }
  if (fused)
    file.add_tensor("blk.1.attn_qkv.weight", at::zeros({(kTinyHeads + 2 * kTinyKvHeads) * kTinyHeadDim, kTinyWidth}));
  return file.bytes();
}

}  // namespace

TEST_CASE("a GGUF file's model has its settings and its weights") {
  const Folder folder;
  auto model = random_llama();
  folder.write("model.gguf", file_of(model, false));
  const auto path = folder.path("model.gguf");
  auto found = causal_lm_from_gguf(path);
  REQUIRE(!found->is_training());
  for (const auto& [name, tensor] : state_dict(*model)) REQUIRE(at::equal(state_dict(*found).at(name), tensor));
  for (const auto& parameter : found->parameters()) REQUIRE(parameter.requires_grad());
  const torch::NoGradGuard no_grad;
  const auto ids = torch::randint(kTinyVocab, {2, 20});
  REQUIRE(at::equal(generate(*found, ids, GenerateOptions(5)), generate(*model, ids, GenerateOptions(5))));

  auto half = causal_lm_from_gguf(path, GgufOptions().dtype(at::kBFloat16).max_positions(8));
  REQUIRE(half->options.max_positions() == 8);
  for (const auto& [name, tensor] : state_dict(*model))
    REQUIRE(at::equal(state_dict(*half).at(name), tensor.to(at::kBFloat16)));
}

TEST_CASE("stored weights of a GGUF file stay as the file holds them") {
  const Folder folder;
  folder.write("model.gguf", file_of(random_llama(), true));
  const auto path = folder.path("model.gguf");
  auto stored = causal_lm_from_gguf(path, GgufOptions().weights("stored").dtype(at::kDouble));
  auto expanded = causal_lm_from_gguf(path, GgufOptions().dtype(at::kDouble));
  int64_t blocks = 0;
  for (const auto& [name, tensor] : state_dict(*stored)) {
    REQUIRE(!tensor.requires_grad());
    const auto numbers = is_stored(tensor) ? widen_stored(tensor, at::kDouble) : tensor;
    REQUIRE(at::equal(numbers, state_dict(*expanded).at(name)));
    blocks += is_stored(tensor);
  }
  REQUIRE(blocks == 15);  // seven of each layer and the table
  const auto ids = torch::randint(kTinyVocab, {2, 20});
  REQUIRE(at::allclose(stored(ids), expanded(ids), 1e-10, 1e-10));
  const auto copy = std::dynamic_pointer_cast<CausalLMImpl>(stored->clone());
  for (const auto& parameter : copy->parameters()) REQUIRE(!parameter.requires_grad());
  REQUIRE(at::equal(copy->forward(ids), stored(ids)));
}

TEST_CASE("what cannot be loaded is refused by name") {
  const Folder folder;
  const auto path = folder.path("model.gguf");
  const auto refuses = [&](const char* words, const std::string& bytes, const GgufOptions& options = {}) {
    folder.write("model.gguf", bytes);
    return complains(words, [&] { causal_lm_from_gguf(path, options); });
  };
  const auto whole = file_of(random_llama(), false);
  REQUIRE(refuses("architecture 'mamba' is not supported; from_gguf reads llama, qwen2, qwen3",
                  file_of(random_llama(), false, "mamba")));
  REQUIRE(refuses("the file is truncated", whole.substr(0, whole.size() - 40)));
  REQUIRE(refuses("weights: got 'both', want 'expanded' or 'stored'", whole, GgufOptions().weights("both")));
  REQUIRE(refuses("dtype is Int, wants a floating one", whole, GgufOptions().dtype(at::kInt)));
  REQUIRE(refuses("device: got meta, want cpu", whole, GgufOptions().weights("stored").device(at::kMeta)));
  REQUIRE(refuses("device: got meta, want one with memory", whole, GgufOptions().device(at::kMeta)));
  if (!at::hasXPU())
    REQUIRE(refuses("device: got xpu, want one that this torch and this machine have", whole,
                    GgufOptions().device(at::kXPU)));
  REQUIRE(refuses("max_positions", whole, GgufOptions().max_positions(0)));
  REQUIRE(refuses("has blk.1.attn_q.weight and another tensor for the weight model.layers.1.self_attn.q_proj.weight",
                  file_of(random_llama(), false, "llama", true)));
  const auto with_heads = [](uint32_t width, uint32_t heads) {
    return GgufBytes()
        .add("general.architecture", "llama")
        .add("llama.embedding_length", width)
        .add("llama.block_count", 1u)
        .add("llama.attention.head_count", heads)
        .add_tensor("token_embd.weight", at::ones({4, 8}))
        .bytes();
  };
  REQUIRE(
      refuses("llama.embedding_length is 8, wants at least one dim for each of the llama.attention.head_count = 16 "
              "heads, because llama.attention.key_length is absent; the file is damaged, get it again",
              with_heads(8, 16)));
  bool said = false;
  {
    const GroupedNumbers german;
    said = refuses("its configuration asks for 2000000 heads of head_dim 1500, together 1048576",
                   with_heads(3'000'000'000, 2'000'000)) &&
           complains("does not divide embed_dim 1026", [] { MultiHeadAttention(1026, 4); });
  }
  REQUIRE(said);
  auto other = whole;
  other.replace(other.find("blk.1.attn_k.weight"), 19, "blk.1.attn_z.weight");
  REQUIRE(refuses("tensor blk.1.attn_z.weight has no place in the architecture llama; give another model", other));
}

}  // namespace attnpack
