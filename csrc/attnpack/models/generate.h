#pragma once

#include <attnpack/models/causal_lm.h>
#include <attnpack/ops/option_list.h>

#include <functional>
#include <string>
#include <vector>

namespace attnpack {

struct GenerateOptions : OptionList<GenerateOptions> {
  explicit GenerateOptions(int64_t max_new_tokens) : max_new_tokens_(max_new_tokens) {}
  ATTNPACK_OPTION(int64_t, max_new_tokens);
  // "dynamic", "static" (allocated at once), "sliding" (for layers with a window only the window's memory, "dynamic"
  // for the others), "paged" (allocated at once, in pages of 16 that several answers to a prompt share), "int8" and
  // "int4" (QuantizedCaches; int4 with exact_first 4 and exact_last 128), or "none":
  // everything is computed anew for each token.
  ATTNPACK_OPTION(std::string, cache) = "dynamic";
  // A cache of your own instead; the prompt continues after the positions that it holds. A row that has stopped keeps
  // appending the token that fills it while other rows run: crop or reorder the cache by what each row really holds.
  ATTNPACK_OPTION(std::shared_ptr<ModelCache>, model_cache);
  // How many answers each prompt gets. The prompt runs once, and its answers share what the cache holds of it: pages of
  // a PagedCache as they are, rows of other caches as copies. A StaticCache in model_cache cannot do so.
  ATTNPACK_OPTION(int64_t, num_return_sequences) = 1;
  // Valid tokens of each right-padded prompt, [B]; default: all.
  ATTNPACK_OPTION(std::optional<at::Tensor>, lengths);
  // A row that gives one of them stops and is filled with it.
  ATTNPACK_OPTION(std::vector<int64_t>, stop_tokens);
  // Samples from softmax(logits / temperature), restricted to the top_k likeliest tokens and to the fewest tokens that
  // hold top_p of the probability. Tokens that tie with the last of the top_k stay too, and top_k 0 is no limit, as in
  // transformers. Greedy if none of the three is given, or at temperature 0.
  ATTNPACK_OPTION(std::optional<double>, temperature);
  ATTNPACK_OPTION(std::optional<int64_t>, top_k);
  ATTNPACK_OPTION(std::optional<double>, top_p);
  // The seed of the draws; default: torch's own generator.
  ATTNPACK_OPTION(std::optional<uint64_t>, seed);
  // Called with each step's tokens [B]; false ends generation.
  ATTNPACK_OPTION(std::function<bool(const at::Tensor&)>, callback);
};

// Returns prompt [B, L] (int32 or int64) with the new tokens after it, int64 [B * num_return_sequences, L + new], new
// <= max_new_tokens; the answers to one prompt follow each other. The loop ends early when all rows have stopped. A
// right-padded row continues at its own position; its new tokens still stand from column L on.
at::Tensor generate(CausalLMImpl& model, const at::Tensor& prompt, const GenerateOptions& options);

// The settings of an encoder-decoder that generate needs beside the options of the loop.
struct EncoderDecoderGenerateInputs : OptionList<EncoderDecoderGenerateInputs> {
  // States of the decoder [B, E] -> logits [B, V]: any module of torch, or a function. Default: the products with the
  // decoder's own token embeddings (Press and Wolf 2017, arXiv 1608.05859).
  ATTNPACK_OPTION(std::function<at::Tensor(const at::Tensor&)>, head);
  ATTNPACK_OPTION(std::optional<at::Tensor>, source_lens);  // valid source tokens of each sequence, [B]
};

// The same for an encoder-decoder: returns target [B, L], with which each answer begins, and the new tokens after it.
// The encoder runs once. CrossCaches keep the keys and values of its output, unless the options ask for the cache
// "none". The options' cache is "dynamic", "none" or a model_cache; their lengths are those of target.
at::Tensor generate(EncoderDecoderImpl& model,
                    const at::Tensor& source,  // [B, Ls, E], or ids [B, Ls]
                    const at::Tensor& target,  // ids [B, L]
                    const GenerateOptions& options, const EncoderDecoderGenerateInputs& inputs = {});

}  // namespace attnpack
