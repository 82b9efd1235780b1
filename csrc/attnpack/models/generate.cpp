#include <attnpack/models/generate.h>

#include <attnpack/core/padded.h>
#include <attnpack/models/detail/sampler.h>
#include <attnpack/modules/detail/checks.h>

#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>

namespace attnpack {

namespace {

// The last new token is not appended: nobody asks for what follows it.
void check_room(const ModelCache& cache, const at::Tensor& lengths, int64_t max_new_tokens) {
  if (lengths.numel() == 0) return;
  for (const auto& layer : cache.layers()) {
    const auto held = layer->lengths().size(0) == lengths.size(0) ? layer->lengths().to(lengths.device()) : lengths * 0;
    const auto need = (held + lengths).max().item<int64_t>() + std::max<int64_t>(max_new_tokens - 1, 0);
    ATTNPACK_CHECK(need <= layer->capacity().value_or(need), "cache: got room for ", *layer->capacity(),
                   " positions, want ", need, " for what it holds, the prompt and ", max_new_tokens,
                   " new tokens: make it longer, ask for fewer, or take the cache \"dynamic\"");
  }
}

// Pages for each prompt, which its answers share, and for each answer: a copy of the prompt's last page, and new ones.
int64_t pages_for(const at::Tensor& ids, const GenerateOptions& o) {
  constexpr int64_t kPageSize = 16;
  const auto pages = [](int64_t positions) { return (positions + kPageSize - 1) / kPageSize; };
  const int64_t each = pages(ids.size(1)) + o.num_return_sequences() * (pages(o.max_new_tokens()) + 1);
  return std::max<int64_t>(ids.size(0) * each, 1);
}

void check_answers(const GenerateOptions& o) {
  ATTNPACK_CHECK(o.num_return_sequences() >= 1, "num_return_sequences: got ", o.num_return_sequences(),
                 ", want how many answers each prompt gets, 1 or more");
  if (!o.model_cache() || o.num_return_sequences() == 1) return;
  for (const auto& layer : o.model_cache()->layers())
    ATTNPACK_CHECK(!std::dynamic_pointer_cast<StaticCache>(layer), "cache: got a StaticCache for ",
                   o.num_return_sequences(),
                   " answers to each prompt, want one whose batch may grow: use a PagedCache "
                   "or a DynamicCache, or the cache \"static\"");
}

std::shared_ptr<ModelCache> make_cache(const CausalLMImpl& model, const at::Tensor& ids, const at::Tensor& lengths,
                                       const GenerateOptions& o) {
  if (o.model_cache()) {
    if (o.max_new_tokens() > 0) check_room(*o.model_cache(), lengths, o.max_new_tokens());
    return o.model_cache();
  }
  if (o.cache() == "dynamic") return model.dynamic_cache();
  if (o.cache() == "static") return model.static_cache(ids.size(0), ids.size(1) + o.max_new_tokens());
  if (o.cache() == "sliding") return model.sliding_cache();
  if (o.cache() == "int8") return model.quantized_cache(8);
  if (o.cache() == "int4") return model.quantized_cache(QuantizedCacheOptions(4).exact_first(4).exact_last(128));
  if (o.cache() == "paged") return model.paged_cache(ids.size(0), pages_for(ids, o));
  ATTNPACK_CHECK(o.cache() == "none", "cache: got '", o.cache(),
                 "', want 'dynamic', 'static', 'sliding', 'paged', 'int8', 'int4' or 'none'");
  return nullptr;
}

// Each sequence as several, index [B * n]. The caller's own cache stays the object that it is.
std::shared_ptr<ModelCache> share_rows(const std::shared_ptr<ModelCache>& cache, const at::Tensor& index) {
  std::vector<std::shared_ptr<KVCache>> layers;
  for (const auto& layer : cache->layers()) {
    if (!std::dynamic_pointer_cast<StaticCache>(layer)) {
      layer->reorder(index);
      layers.push_back(layer);
      continue;
    }
    const auto& held = layer->tensors();
    const auto rows = [&](const at::Tensor& x) { return x.index_select(0, index); };
    layers.push_back(std::make_shared<StaticCache>(CacheTensors{rows(held.key), rows(held.value), rows(held.lengths)}));
  }
  return std::make_shared<ModelCache>(std::move(layers));
}

at::Tensor prompt_lengths(const at::Tensor& ids, const GenerateOptions& o) {
  if (!o.lengths()) return at::full({ids.size(0)}, ids.size(1), ids.options());
  check_lengths("lengths", o.lengths(), ids, 1);
  if (!o.lengths()->is_cpu())
    check_length_values("lengths", *o.lengths(), 1, ids.size(1));  // waits, as each token does
  return o.lengths()->to(ids.options());
}

// The last valid state of each row, [B, L, E] -> [B, E].
at::Tensor last(const at::Tensor& hidden, const at::Tensor& lengths) {
  const auto index = (lengths - 1).view({-1, 1, 1}).expand({-1, 1, hidden.size(2)});
  return hidden.gather(1, index).squeeze(1);
}

// Gives the state from which each next token is chosen: from a cache, or computed anew.
class Stepper {
 public:
  Stepper(CausalLMImpl& model, std::shared_ptr<ModelCache> cache, const at::Tensor& ids, const at::Tensor& lengths,
          bool ragged)
      : model_(model), cache_(std::move(cache)), ids_(ids), lengths_(lengths), ragged_(ragged) {}

  at::Tensor prompt() {
    auto inputs = CausalLMInputs().cache(cache_);
    if (ragged_) inputs.lengths(lengths_);
    const auto hidden = model_.hidden(ids_, inputs);
    return ragged_ ? last(hidden, lengths_) : hidden.select(1, ids_.size(1) - 1);
  }

  // From now on each sequence is `count` ones.
  void share(int64_t count) {
    const auto index = at::arange(ids_.size(0), ids_.options()).repeat_interleave(count);
    ids_ = ids_.index_select(0, index);
    lengths_ = lengths_.index_select(0, index);
    if (cache_) cache_ = share_rows(cache_, index);
  }

  at::Tensor next(const at::Tensor& tokens) {  // [B] -> [B, E]
    if (cache_) return model_.hidden(tokens.unsqueeze(1), CausalLMInputs().cache(cache_)).select(1, 0);
    ids_ = at::cat({ids_, tokens.unsqueeze(1)}, 1);
    // Padding stands between a short prompt and its new tokens. So each new token goes where its row ends.
    if (ragged_) ids_.scatter_(1, lengths_.unsqueeze(1), tokens.unsqueeze(1));
    lengths_ = lengths_ + 1;
    return prompt();
  }

 private:
  CausalLMImpl& model_;
  std::shared_ptr<ModelCache> cache_;
  at::Tensor ids_, lengths_;
  bool ragged_;
};

}  // namespace

at::Tensor generate(CausalLMImpl& model, const at::Tensor& prompt, const GenerateOptions& options) {
  check_defined("ids", prompt);
  ATTNPACK_CHECK(!prompt.is_meta(), "ids: got a tensor on meta, which holds no token numbers; generate on a device ",
                 "with memory, with a model whose weights are loaded");
  const bool integers = prompt.scalar_type() == at::kLong || prompt.scalar_type() == at::kInt;
  ATTNPACK_CHECK(prompt.dim() == 2 && prompt.size(1) > 0 && integers, "ids: got ", prompt.scalar_type(), " of shape ",
                 prompt.sizes(),
                 ", want int64 token numbers [B, L] with L at least 1; for one sequence pass ids.unsqueeze(0)");
  const auto ids = prompt.to(at::kLong);
  ATTNPACK_CHECK(options.max_new_tokens() >= 0, "max_new_tokens: got ", options.max_new_tokens(), ", want 0 or more");
  check_answers(options);
  at::NoGradGuard no_grad;
  const int64_t answers = options.num_return_sequences();
  const auto lengths = prompt_lengths(ids, options);
  Stepper stepper(model, make_cache(model, ids, lengths, options), ids, lengths, options.lengths().has_value());
  Sampler sample(options.temperature(), options.top_k(), options.top_p(), options.seed(), ids.device());
  const auto stop_tokens = at::tensor(options.stop_tokens(), ids.options());
  auto stopped = at::zeros({ids.size(0) * answers}, ids.options().dtype(at::kBool));

  at::Tensor tokens;
  const auto logits = [&](bool first) {
    // Nobody else sees the cache and the states, so autograd need not count in-place writes and views.
    std::optional<at::AutoDispatchBelowADInplaceOrView> quiet;
    if (!options.model_cache()) quiet.emplace();
    if (!first) return model.head(stepper.next(tokens));
    const auto result = model.head(stepper.prompt());
    if (answers == 1) return result;
    stepper.share(answers);
    return result.repeat_interleave(answers, 0);
  };
  std::vector<at::Tensor> pieces{answers == 1 ? ids : ids.repeat_interleave(answers, 0)};
  for (int64_t step = 0; step < options.max_new_tokens(); ++step) {
    const auto chosen = sample(logits(step == 0));
    tokens = step == 0 ? chosen : at::where(stopped, tokens, chosen);
    pieces.push_back(tokens.unsqueeze(1));
    if (options.callback() && !options.callback()(tokens)) break;
    if (!options.stop_tokens().empty()) {
      stopped = stopped | at::isin(tokens, stop_tokens);
      if (stopped.all().item<bool>()) break;
    }
  }
  return at::cat(pieces, 1);
}

}  // namespace attnpack
