#include <attnpack/models/generate.h>

#include <attnpack/cache/paged_cache.h>
#include <attnpack/cache/recurrent_cache.h>
#include <attnpack/core/padded.h>
#include <attnpack/core/text.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/models/detail/generate_steps.h>
#include <attnpack/models/detail/sampler.h>
#include <attnpack/modules/detail/checks.h>

#include <ATen/core/LegacyTypeDispatch.h>

#include <functional>
#include <optional>

namespace attnpack {

namespace {

// Raises unless the pool has pages for sequences that hold `past` positions and get `more`, [B] each.
void check_pages(const PagedCache& cache, const at::Tensor& past, const at::Tensor& more) {
  const auto pages = [&](const at::Tensor& positions) {
    return (positions + (cache.page_size() - 1)).floor_divide(cache.page_size());
  };
  const auto need = (pages(past + more) - pages(past)).sum().item<int64_t>();
  ATTNPACK_CHECK(need <= cache.free_pages(), "cache: got ", cache.free_pages(), " free pages of ", cache.page_size(),
                 " positions, want ", need,
                 " for the prompts and their new tokens: give the PagedCache more pages, ask "
                 "for fewer tokens, or take the cache \"paged\"");
}

// The last new token is not appended: nobody asks for what follows it.
void check_room(const ModelCache& cache, const at::Tensor& lengths, int64_t max_new_tokens) {
  if (lengths.numel() == 0) return;
  const auto appended = std::max<int64_t>(max_new_tokens - 1, 0);
  for (const auto& layer : cache.layers()) {
    const auto past = layer->lengths().size(0) == lengths.size(0) ? layer->lengths().to(lengths.device()) : lengths * 0;
    if (const auto paged = std::dynamic_pointer_cast<PagedCache>(layer)) check_pages(*paged, past, lengths + appended);
    const auto need = (past + lengths).max().item<int64_t>() + appended;
    ATTNPACK_CHECK(need <= layer->capacity().value_or(need), "cache: got room for ", *layer->capacity(),
                   " positions, want ", need, " for what it holds, the prompt and ", max_new_tokens,
                   " new tokens: make it longer, ask for fewer, or take the cache \"dynamic\"");
  }
}

// The caller's own cache.
std::shared_ptr<ModelCache> given_cache(const at::Tensor& lengths, const GenerateOptions& o) {
  if (o.max_new_tokens() > 0) check_room(*o.model_cache(), lengths, o.max_new_tokens());
  return o.model_cache();
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
  if (o.model_cache()) return given_cache(lengths, o);
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

// A cache that nobody else sees need not go back to where it was before a call.
void write_in_place(const ModelCache& cache) {
  for (const auto& layer : cache.layers())
    if (const auto recurrent = std::dynamic_pointer_cast<RecurrentCache>(layer)) recurrent->write_in_place(true);
}

// Each sequence as several, index [B * n]. The caller's own cache stays the object that it is.
std::shared_ptr<ModelCache> share_rows(const std::shared_ptr<ModelCache>& cache, const at::Tensor& index) {
  std::vector<std::shared_ptr<KVCache>> layers;
  for (const auto& layer : cache->layers()) {
    if (!std::dynamic_pointer_cast<StaticCache>(layer)) {
      if (layer->lengths().size(0) > 0) layer->reorder(index);  // a layer without keys of its own holds none
      layers.push_back(layer);
      continue;
    }
    const auto& tensors = layer->tensors();
    const auto rows = [&](const at::Tensor& x) { return x.index_select(0, index); };
    layers.push_back(
        std::make_shared<StaticCache>(CacheTensors{rows(tensors.key), rows(tensors.value), rows(tensors.lengths)}));
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

// A model as the loop sees it.
struct Model {
  // The states of new ids [B, L], [B, L, E]: after what the cache holds, or without a cache of all that there are.
  // lengths [B]: the valid tokens of right-padded ids.
  std::function<at::Tensor(const at::Tensor& ids, const std::shared_ptr<ModelCache>& cache,
                           const std::optional<at::Tensor>& lengths)>
      states;
  std::function<at::Tensor(const at::Tensor&)> head;  // [B, E] -> logits [B, V]
  // From now on sequence i is what index[i] was. The cache is not this function's.
  std::function<void(const at::Tensor& index)> pick_rows;
  // The tokens of the process that chooses, where several share the model.
  std::function<at::Tensor(const at::Tensor& tokens)> agreed;
  // The length past which all states change. A sequence that passes it fills the cache anew.
  std::optional<int64_t> switch_length = std::nullopt;
  bool keeps_past = false;  // without a cache: states come after all ids before
};

std::function<at::Tensor(const at::Tensor&)> agreed_by(const std::shared_ptr<const EmbeddingShare>& share) {
  if (!share) return {};
  return [share](const at::Tensor& tokens) { return share->agreed(tokens); };
}

// The trained length of LongRoPE, past which it has other frequencies. The cached keys of deeper layers come from
// states of the old ones. None for other models.
std::optional<int64_t> switch_length_of(const CausalLMOptions& o) {
  const auto of = [&](const std::optional<RopeScaling>& scaling) {
    const bool switches = scaling && scaling->rope_type() == "longrope";
    return switches ? std::optional(scaling->original_max_position_embeddings().value_or(o.max_positions()))
                    : std::nullopt;
  };
  for (const auto& layer : o.layer_settings())
    if (const auto length = of(layer.rope_scaling())) return length;
  return of(o.rope_scaling());
}

// Gives the state from which each next token is chosen: from a cache, or computed anew.
class Stepper {
 public:
  Stepper(const Model& model, std::shared_ptr<ModelCache> cache, const at::Tensor& ids, const at::Tensor& lengths,
          bool ragged)
      : model_(model), cache_(std::move(cache)), ids_(ids), lengths_(lengths), ragged_(ragged) {}

  at::Tensor prompt() {
    const auto hidden = model_.states(ids_, cache_, ragged_ ? std::optional(lengths_) : std::nullopt);
    return ragged_ ? last(hidden, lengths_) : hidden.select(1, ids_.size(1) - 1);
  }

  // From now on each sequence is `count` ones.
  void share(int64_t count) {
    const auto index = at::arange(ids_.size(0), ids_.options()).repeat_interleave(count);
    ids_ = ids_.index_select(0, index);
    lengths_ = lengths_.index_select(0, index);
    if (cache_) cache_ = share_rows(cache_, index);
    model_.pick_rows(index);
  }

  at::Tensor next(const at::Tensor& tokens) {  // [B] -> [B, E]
    if ((cache_ && !model_.switch_length) || model_.keeps_past) return of_new(tokens);
    ids_ = at::cat({ids_, tokens.unsqueeze(1)}, 1);
    // Padding stands between a short prompt and its new tokens. So each new token goes where its row ends.
    if (ragged_) ids_.scatter_(1, lengths_.unsqueeze(1), tokens.unsqueeze(1));
    lengths_ = lengths_ + 1;
    if (cache_) {
      if (!lengths_.eq(*model_.switch_length + 1).any().item<bool>()) return of_new(tokens);
      cache_->reset();
    }
    return prompt();
  }

 private:
  at::Tensor of_new(const at::Tensor& tokens) {
    return model_.states(tokens.unsqueeze(1), cache_, std::nullopt).select(1, 0);
  }

  const Model& model_;
  std::shared_ptr<ModelCache> cache_;
  at::Tensor ids_, lengths_;
  bool ragged_;
};

at::Tensor checked_ids(const char* name, const at::Tensor& ids) {
  check_defined(name, ids);
  ATTNPACK_CHECK(!ids.is_meta(), name, ": got a tensor on meta, which holds no token numbers; generate on a device ",
                 "with memory, with a model whose weights are loaded");
  const bool integers = ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt;
  ATTNPACK_CHECK(ids.dim() == 2 && ids.size(1) > 0 && integers, name, ": got ", ids.scalar_type(), " of shape ",
                 ids.sizes(), ", want int64 token numbers [B, L] with L at least 1; for one sequence pass ", name,
                 ".unsqueeze(0)");
  return ids.to(at::kLong);
}

void check_loop(const GenerateOptions& o) {
  refuse_context_parallel("generate is called", "call it outside, with the whole prompt on each rank");
  ATTNPACK_CHECK(o.max_new_tokens() >= 0, "max_new_tokens: got ", o.max_new_tokens(), ", want 0 or more");
  check_answers(o);
}

// The loop: ids with the new tokens after them, [B * answers, L + new].
at::Tensor answer(const Model& model, Stepper stepper, const at::Tensor& ids, const GenerateOptions& options) {
  const int64_t answers = options.num_return_sequences();
  Sampler sample(options.temperature(), options.top_k(), options.top_p(), options.seed(), ids.device());
  const auto stop_tokens = at::tensor(options.stop_tokens(), ids.options());
  auto stopped = at::zeros({ids.size(0) * answers}, ids.options().dtype(at::kBool));

  at::Tensor tokens;
  const auto state = [&](bool first) {
    // Nobody else sees the cache and the states, so autograd need not count in-place writes and views.
    std::optional<at::AutoDispatchBelowADInplaceOrView> quiet;
    if (!options.model_cache() && !model.keeps_past) quiet.emplace();
    return first ? stepper.prompt() : stepper.next(tokens);
  };
  const auto logits = [&](bool first) {
    const auto result = model.head(state(first));
    if (!first || answers == 1) return result;
    stepper.share(answers);
    return result.repeat_interleave(answers, 0);
  };
  std::vector<at::Tensor> pieces{answers == 1 ? ids : ids.repeat_interleave(answers, 0)};
  for (int64_t step = 0; step < options.max_new_tokens(); ++step) {
    auto chosen = sample(logits(step == 0));
    if (model.agreed) chosen = model.agreed(chosen);  // draws differ where the processes' generators do
    tokens = step == 0 || options.stop_tokens().empty() ? chosen : at::where(stopped, tokens, chosen);
    pieces.push_back(tokens.unsqueeze(1));
    if (options.callback() && !options.callback()(tokens)) break;
    if (!options.stop_tokens().empty()) {
      stopped = stopped | at::isin(tokens, stop_tokens);
      if (stopped.all().item<bool>()) break;
    }
  }
  return at::cat(pieces, 1);
}

}  // namespace

at::Tensor generate(CausalLMImpl& model, const at::Tensor& prompt, const GenerateOptions& options) {
  const auto ids = checked_ids("ids", prompt);
  check_loop(options);
  const at::NoGradGuard no_grad;
  const auto lengths = prompt_lengths(ids, options);
  const Model loop_model{
      [&model](const auto& new_ids, const auto& cache, const auto& valid) {
        return model.hidden(new_ids, CausalLMInputs().cache(cache).lengths(valid));
      },
      [&model](const at::Tensor& state) { return model.head(state); },
      [](const at::Tensor&) {},
      agreed_by(model.model->embed_tokens->share),
      // A given cache may hold what came before the ids, which nobody could compute anew.
      options.model_cache() ? std::nullopt : switch_length_of(model.options),
  };
  const auto cache = make_cache(model, ids, lengths, options);
  if (cache && !options.model_cache()) write_in_place(*cache);
  Stepper stepper(loop_model, cache, ids, lengths, options.lengths().has_value());
  return answer(loop_model, std::move(stepper), ids, options);
}

namespace {

std::shared_ptr<ModelCache> make_cache(const EncoderDecoderImpl& model, const at::Tensor& lengths,
                                       const GenerateOptions& o) {
  if (o.model_cache()) return given_cache(lengths, o);
  if (o.cache() == "dynamic") return model.decoder->new_cache();
  ATTNPACK_CHECK(o.cache() == "none", "cache: got '", o.cache(),
                 "', an encoder-decoder wants 'dynamic', 'none', or a ModelCache of any kind");
  return nullptr;
}

// inputs.head, or the decoder's own embeddings.
std::function<at::Tensor(const at::Tensor&)> head_of(const EncoderDecoderImpl& model,
                                                     const EncoderDecoderGenerateInputs& inputs) {
  const auto& embed_tokens = model.decoder->embed_tokens;
  ATTNPACK_CHECK(embed_tokens, "target: got token numbers, but the decoder has no embed_tokens: make it with them");
  const auto* layer = inputs.head().target<Linear>();
  ATTNPACK_CHECK(!layer || !layer->is_empty(),
                 "head: got an empty Linear, want a layer or a function that gives logits");
  if (inputs.head())
    return [head = inputs.head()](const at::Tensor& state) {
      const auto logits = head(state);
      ATTNPACK_CHECK(logits.defined() && logits.dim() == 2 && logits.size(0) == state.size(0) && logits.size(1) > 0,
                     "head: got logits of shape ", logits.defined() ? text_of({logits.sizes()}) : "none",
                     " for states ", state.sizes(), ", want [", state.size(0), ", V]");
      return logits;
    };
  return [table = embed_tokens.operator->()](const at::Tensor& state) { return table->logits(state); };
}

}  // namespace

at::Tensor generate(EncoderDecoderImpl& model, const at::Tensor& source, const at::Tensor& target,
                    const GenerateOptions& options, const EncoderDecoderGenerateInputs& inputs) {
  const auto ids = checked_ids("target", target);
  check_loop(options);
  check_defined("source", source);
  ATTNPACK_CHECK(source.dim() > 0 && source.size(0) == ids.size(0), "source: got shape ", source.sizes(), ", want ",
                 ids.size(0), " sequences, as target has");
  const auto head = head_of(model, inputs);
  const at::NoGradGuard no_grad;
  const auto lengths = prompt_lengths(ids, options);
  const auto cache = make_cache(model, lengths, options);
  if (cache && !options.model_cache()) write_in_place(*cache);
  const auto cross_cache = cache ? model.new_cross_cache() : nullptr;
  auto context = model.encode(source, inputs.source_lens());
  auto source_lens = inputs.source_lens();
  const Model loop_model{
      [&](const auto& new_ids, const auto& call_cache, const auto& valid) {
        return model.decode(context, new_ids,
                            EncoderDecoderInputs()
                                .source_lens(source_lens)
                                .target_lens(valid)
                                .cache(call_cache)
                                .cross_cache(cross_cache));
      },
      head,
      [&](const at::Tensor& index) {
        if (cross_cache) cross_cache->reorder(index);
        context = context.index_select(0, index);
        if (source_lens) source_lens = source_lens->index_select(0, index);
      },
      agreed_by(model.decoder->embed_tokens->share),
  };
  Stepper stepper(loop_model, cache, ids, lengths, options.lengths().has_value());
  return answer(loop_model, std::move(stepper), ids, options);
}

at::Tensor generate(const GenerateSteps& steps, const at::Tensor& prompt, const GenerateOptions& options) {
  const auto ids = checked_ids("ids", prompt);
  check_loop(options);
  const at::NoGradGuard no_grad;
  const auto lengths = prompt_lengths(ids, options);
  const Model loop_model{
      .states = [&](const auto& new_ids, const auto&, const auto& valid) { return steps.states(new_ids, valid); },
      .head = steps.head,
      .pick_rows = steps.pick_rows,
      .agreed = steps.agreed,
      .keeps_past = true};
  Stepper stepper(loop_model, nullptr, ids, lengths, options.lengths().has_value());
  return answer(loop_model, std::move(stepper), ids, options);
}

}  // namespace attnpack
