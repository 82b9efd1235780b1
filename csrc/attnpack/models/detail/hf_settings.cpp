#include <attnpack/models/detail/hf_settings.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace attnpack {

namespace {

// Settings that do not change what CausalLM computes: about training, generation, tokens and files, and switches of
// how transformers computes. Dropout is among them: a loaded model is in evaluation mode, and has none in training.
constexpr std::string_view kHarmless =
    " architectures auto_map transformers_version torch_dtype dtype _name_or_path model_type use_cache "
    "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id "
    "initializer_range pretraining_tp output_router_logits router_aux_loss_coef output_attentions "
    "output_hidden_states return_dict torchscript id2label label2id problem_type task_specific_params "
    "attn_implementation _attn_implementation _attn_implementation_autoset cache_implementation summary_type "
    "summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx resid_pdrop "
    "embd_pdrop attn_pdrop residual_dropout embedding_dropout hidden_dropout reorder_and_upcast_attn "
    "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 seq_aux aux_loss_alpha ep_size "
    "num_nextn_predict_layers num_mtp_layers initial_context_length original_max_position_embeddings "
    "unsloth_fixed experts_per_token interpolate_factor full_attn_mod pre_allocate_kv_cache validate_runner_input "
    "inference_runner is_llama_config transformers.js_config tokenizer_class max_length min_length do_sample "
    "temperature top_k top_p repetition_penalty length_penalty num_beams num_return_sequences early_stopping "
    "no_repeat_ngram_size pad_key_length ff_factor "
    "attention_dropout classifier_dropout router_jitter_noise eod_token_id ";

bool is_harmless(const std::string& name) {
  return name.find(' ') == name.npos && kHarmless.find(" " + name + " ") != kHarmless.npos;
}

// Settings of the whole model that hold for its language model.
constexpr std::string_view kOfAllParts[] = {"tie_word_embeddings", "quantization_config"};

}  // namespace

void HfSettings::enter_language_model() {
  if (std::find(std::begin(kMultimodal), std::end(kMultimodal), model_type()) == std::end(kMultimodal)) return;
  const auto whole = std::move(config_);
  const auto* text = whole.find("text_config");
  const auto* members = text ? text->as<Json::Object>() : nullptr;
  check(members, "text_config in config.json is ", quoted(text), ", wants the settings of the language model");
  auto settings = *members;
  for (const auto name : kOfAllParts) {
    const auto* value = whole.find(name);
    if (!value || value->is_null()) continue;
    std::erase_if(settings, [&](const auto& member) { return member.name == name; });
    settings.push_back({std::string(name), *value});
  }
  config_.value = std::move(settings);
  multimodal_ = true;
}

void HfSettings::fill_in(const std::vector<HfSize>& sizes) {
  auto* members = std::get_if<Json::Object>(&config_.value);
  for (const auto& [name, size] : sizes)
    if (members && !has(name)) members->push_back({name, {size}});
}

const char* HfSettings::called(const char* name) const {
  for (const auto& [usual, theirs, takes_usual] : aliases_)
    if (std::string_view(usual) == name && (!takes_usual || config_.find(theirs) || !config_.find(name))) return theirs;
  return name;
}

const Json& HfSettings::get(const char* name) const {
  static const Json kAbsent;
  asked_.insert(name);  // the usual name too: some configurations have both
  name = called(name);
  asked_.insert(name);
  const auto* found = config_.find(name);
  return found ? *found : kAbsent;
}

int64_t HfSettings::size(const char* name, std::optional<int64_t> usual) const {
  const auto& value = get(name);
  check(usual || !value.is_null(), "config.json lacks ", called(name));
  if (value.is_null()) return *usual;
  const auto* number = value.as<int64_t>();
  check(number && *number >= 1, called(name), " in config.json is ", quoted(value), ", wants an int of at least 1");
  return *number;
}

int64_t HfSettings::whole_number(const char* name, int64_t usual) const {
  const auto* number = get(name).as<int64_t>();
  return number && *number == 0 ? 0 : size(name, usual);
}

double HfSettings::softcap(const char* name, double usual) const {
  if (get(name).is_null()) return has(name) ? 0 : usual;
  return number(name, usual);
}

std::vector<int64_t> HfSettings::list_of_ints(const char* name) const {
  const auto& value = get(name);
  std::vector<int64_t> numbers;
  if (value.is_null()) return numbers;
  const auto* list = value.as<Json::List>();
  for (size_t i = 0; list && i < list->size(); ++i)
    if (const auto* number = (*list)[i].as<int64_t>()) numbers.push_back(*number);
  check(list && numbers.size() == list->size(), name, " in config.json is ", quoted(value), ", wants a list of ints");
  return numbers;
}

bool HfSettings::is_word(const char* name, std::string_view word) const {
  const auto* value = get(name).as<std::string>();
  return value && *value == word;
}

void HfSettings::check_word(const char* name, std::string_view word) const {
  const auto& value = get(name);
  check(value.is_null() || is_word(name, word), name, " = ", quoted(value),
        " in config.json is not supported; it must be ", in_quotes(std::string(word)));
}

void HfSettings::refuse_if_set(const char* name) const {
  check(!is_set(name), name, " = ", quoted(get(name)), " in config.json is not supported yet", kOtherModel);
}

void HfSettings::check_all_read() const {
  const auto* members = config_.as<Json::Object>();
  if (!members) return;
  for (const auto& [name, value] : *members) {
    if (asked_.count(name) || is_harmless(name)) continue;
    check(!attnpack::is_set(value), excerpt(name), " = ", quoted(value),
          " in config.json is not known here, and may change what the model computes; remove it if it does not");
  }
}

double HfSettings::as_number(const std::string& name, const Json& value) const {
  const double number = value.as<bool>() ? 0 : number_in(value).value_or(0);
  check(number > 0 && std::isfinite(number), name, " in config.json is ", quoted(value), ", wants a number above 0");
  return number;
}

double HfSettings::number(const char* name, double usual) const {
  const auto& value = get(name);
  return value.is_null() ? usual : as_number(called(name), value);
}

bool HfSettings::is_set(const char* name) const { return attnpack::is_set(get(name)); }

bool HfSettings::is_on(const char* name, bool usual) const {
  const auto& value = get(name);
  if (value.is_null()) return usual;
  const auto on = number_in(value);
  check(on && (*on == 0 || *on == 1), called(name), " in config.json is ", quoted(value), ", wants true or false");
  return *on == 1;
}

std::string HfSettings::model_type() const {
  const auto* word = get("model_type").as<std::string>();
  return word ? *word : "";
}

bool is_set(const Json& value) {
  return std::visit(
      [](const auto& content) {
        using T = std::decay_t<decltype(content)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return false;
        } else if constexpr (std::is_arithmetic_v<T>) {
          return content != 0;
        } else {
          return !content.empty();
        }
      },
      value.value);
}

std::optional<double> number_in(const Json& value) {
  return std::visit(
      [](const auto& content) {
        std::optional<double> number;
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(content)>>) number = content;
        return number;
      },
      value.value);
}

}  // namespace attnpack
