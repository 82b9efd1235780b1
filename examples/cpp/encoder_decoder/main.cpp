// An encoder-decoder learns to write its source backwards. Then generate writes new sources token by token: the encoder
// runs once for each batch, a CrossCache keeps its keys and values, and a DynamicCache those of the target.
#include <attnpack/models/generate.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/modules/stack.h>
#include <attnpack/modules/state_dict.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>

#include <iostream>
#include <vector>

namespace {

using attnpack::MultiHeadAttention, attnpack::MultiHeadAttentionOptions;

constexpr int64_t kLetters = 10, kBegin = kLetters, kVocabulary = kLetters + 1, kLength = 8;
constexpr int64_t kWidth = 64, kHeads = 4, kLayers = 2, kSteps = 500;

class Reverser : public torch::nn::Module {
 public:
  Reverser() {
    const attnpack::RotaryEmbedding rope(kWidth / kHeads);
    const auto attention = [&](bool causal) {
      return MultiHeadAttention(MultiHeadAttentionOptions(kWidth, kHeads).rope(rope).causal(causal));
    };
    const auto cross_attention = [] { return MultiHeadAttention(kWidth, kHeads); };
    const auto feed_forward = [] { return attnpack::FeedForward(kWidth, 2 * kWidth); };
    std::vector<attnpack::EncoderBlock> readers;
    std::vector<attnpack::DecoderBlock> writers;
    for (int64_t i = 0; i < kLayers; ++i) {
      readers.emplace_back(attention(false), feed_forward());
      writers.emplace_back(
          attnpack::DecoderBlockOptions(attention(true), feed_forward()).cross_attention(cross_attention()));
    }
    const attnpack::Embedding source(kVocabulary, kWidth), target(kVocabulary, kWidth);
    stacks_ = register_module(
        "stacks", attnpack::EncoderDecoder(attnpack::Encoder(attnpack::EncoderOptions(readers).embed_tokens(source)),
                                           attnpack::Decoder(attnpack::DecoderOptions(writers).embed_tokens(target))));
    head_ = register_module("head", attnpack::Linear(attnpack::LinearOptions(kWidth, kVocabulary)));
  }

  // source [B, kLength], target [B, L] -> logits of the tokens after each of the target, [B, L, kVocabulary]
  at::Tensor forward(const at::Tensor& source, const at::Tensor& target,
                     const attnpack::EncoderDecoderInputs& inputs = {}) {
    return head_(stacks_(source, target, inputs));
  }

  // The likeliest target of each source, [B, kLength].
  at::Tensor write(const at::Tensor& source) {
    const auto begin = at::full({source.size(0), 1}, kBegin, at::kLong);
    return attnpack::generate(*stacks_, source, begin, attnpack::GenerateOptions(kLength),
                              attnpack::EncoderDecoderGenerateInputs().head(head_))
        .slice(1, 1);
  }

 private:
  attnpack::EncoderDecoder stacks_{nullptr};
  attnpack::Linear head_{nullptr};
};

at::Tensor draw(int64_t batch) { return at::randint(kLetters, {batch, kLength}, at::kLong); }

}  // namespace

int main() {
  torch::manual_seed(0);
  Reverser model;
  torch::optim::Adam optimizer(attnpack::distinct_parameters(model), torch::optim::AdamOptions());
  for (int step = 0; step <= kSteps; ++step) {
    static_cast<torch::optim::AdamOptions&>(optimizer.param_groups()[0].options())
        .lr(4e-3 * (1 - step / (kSteps + 1.0)));
    const auto source = draw(64), target = source.flip(1);
    const auto given = at::cat({at::full({64, 1}, kBegin, at::kLong), target.slice(1, 0, kLength - 1)}, 1);
    optimizer.zero_grad();
    const auto loss =
        torch::nn::functional::cross_entropy(model.forward(source, given).flatten(0, 1), target.flatten());
    loss.backward();
    optimizer.step();
    if (step % 100 == 0) std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
  }
  model.eval();
  const auto source = draw(200);
  const auto right = model.write(source).eq(source.flip(1)).to(at::kFloat).mean().item<float>();
  std::cout << "right " << 100 * right << " %\n";
  return right > 0.99 ? 0 : 1;
}
