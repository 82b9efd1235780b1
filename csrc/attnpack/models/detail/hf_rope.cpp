#include <algorithm>
#include <array>
#include <string_view>

#include <attnpack/models/detail/hf_config.h>

namespace attnpack {

namespace {

constexpr std::array<std::string_view, 5> kRopeTypes = {"linear", "dynamic", "yarn", "llama3", "longrope"};

template <typename Names>
bool contains(const Names& names, std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

const Json& item(const Json& object, const char* name) {
  static const Json kAbsent;
  const auto* found = object.find(name);
  return found ? *found : kAbsent;
}

// The first that is set, else the last.
const Json& first_set(std::initializer_list<const Json*> values) {
  const auto found = std::find_if(values.begin(), values.end() - 1, [](const Json* value) { return is_set(*value); });
  return **found;
}

// How an option of RopeScaling is read: each gives whether the value is of the right kind.
bool read_setting(const Json& value, double& option) {
  const auto number = value.as<bool>() ? std::nullopt : number_in(value);
  if (number) option = *number;
  return number.has_value();
}
bool read_setting(const Json& value, int64_t& option) {
  const auto* number = value.as<int64_t>();
  if (number) option = *number;
  return number;
}
bool read_setting(const Json& value, bool& option) {
  const auto* flag = value.as<bool>();
  if (flag) option = *flag;
  return flag;
}
bool read_setting(const Json& value, std::string& option) {
  const auto* word = value.as<std::string>();
  if (word) option = *word;
  return word;
}
bool read_setting(const Json& value, std::vector<double>& option) {
  const auto* list = value.as<Json::List>();
  if (!list) return false;
  option.resize(list->size());
  return std::equal(list->begin(), list->end(), option.begin(),
                    [](const Json& number, double& each) { return read_setting(number, each); });
}
template <typename T>
bool read_setting(const Json& value, std::optional<T>& option) {
  return read_setting(value, option.emplace());
}

constexpr const char* wanted(const double&) { return "a number"; }
constexpr const char* wanted(const int64_t&) { return "an int"; }
constexpr const char* wanted(const bool&) { return "true or false"; }
constexpr const char* wanted(const std::string&) { return "a text"; }
constexpr const char* wanted(const std::vector<double>&) { return "a list of numbers"; }
template <typename T>
constexpr const char* wanted(const std::optional<T>&) {
  return wanted(T());
}

void set_option(RopeScaling& scaling, const std::string& name, const Json& value) {
  bool known = false;
  RopeScaling::for_each_option(scaling, [&](const char* option_name, auto& option) {
    if (name != option_name) return;
    known = true;
    refuse_unless(read_setting(value, option), "scaling: ", name, " is ", quoted(value), ", wants ", wanted(option));
  });
  refuse_unless(known, "scaling: got ", excerpt(in_quotes(name)),
                ", which no rope_type here knows; leave it out, or see the docstring of RotaryEmbedding");
}

// As in transformers, missing lengths come from elsewhere in the configuration.
RopeScaling read_scaling(const HfSettings& config, const std::string& source, const std::string& kind,
                         const Json& rope) {
  const auto& longest = config.get("max_position_embeddings");
  const auto& trained = kind == "dynamic" ? longest
                                          : first_set({&item(rope, "original_max_position_embeddings"),
                                                       &config.get("original_max_position_embeddings"), &longest});
  RopeScaling scaling;
  scaling.rope_type(kind);
  // Members that other code reads, or that say nothing about the rotation.
  constexpr std::array<std::string_view, 9> kElsewhere = {"type",
                                                          "rope_type",
                                                          "rope_theta",
                                                          "partial_rotary_factor",
                                                          "original_max_position_embeddings",
                                                          "max_position_embeddings",
                                                          "alpha",
                                                          "finetuned",
                                                          "llama_4_scaling_beta"};
  for (const auto& [name, value] : *rope.as<Json::Object>()) {
    if (!contains(kElsewhere, name) && !value.is_null()) set_option(scaling, name, value);
  }
  if (!trained.is_null()) set_option(scaling, "original_max_position_embeddings", trained);
  if ((kind == "yarn" || kind == "longrope") && !scaling.factor()) {
    const auto words = text_of({"original_max_position_embeddings of ", source});
    scaling.factor(config.as_number("max_position_embeddings", longest) / config.as_number(words, trained));
  }
  return scaling;
}

// The RoPE of an object, with `usual_base` if the object has no base.
HfRope read_rope_of(const HfSettings& config, const char* source, const Json& rope, const Json& usual_base) {
  static const Json kDefault{std::string("default")};
  const auto* members = rope.as<Json::Object>();
  config.check(members, source, " in config.json is ", quoted(rope), ", wants an object with rope_type, or null");
  std::string nested;
  for (const auto& [name, value] : *members) {
    if (value.as<Json::Object>()) (nested += nested.empty() ? "" : ", ") += name;
  }
  config.check(nested.empty(), source, " for kinds of layers (", excerpt(nested),
               ") in config.json is not supported yet", kOtherModel);
  const auto base = config.as_number("rope_theta", first_set({&item(rope, "rope_theta"), &usual_base}));
  const auto& part = item(rope, "partial_rotary_factor");
  const auto& family = hf_family(config);
  const bool phi3 = config.model_type() == "phi3";
  config.check(
      family.honours.count("partial_rotary_factor") || !rope.find("partial_rotary_factor") || number_in(part) == 1.0,
      "partial_rotary_factor = ", quoted(part), " is not supported yet, wants 1 or no such setting", kOtherModel);
  static const Json kLongrope{std::string("longrope")};
  const auto& given = first_set({&item(rope, "rope_type"), &item(rope, "type"), &kDefault});
  const auto* word = given.as<std::string>();
  const bool older = phi3 && word && (*word == "su" || *word == "yarn");  // names of longrope there
  const auto& type = older ? kLongrope : given;
  const auto* kind = type.as<std::string>();
  if (kind && *kind == "default") return {base, std::nullopt};
  // HunYuan's "dynamic" with an alpha has fixed frequencies.
  if (config.model_type() == "hunyuan_v1_dense" && kind && *kind == "dynamic" && is_set(item(rope, "alpha")))
    return {base, RopeScaling().rope_type("ntk").factor(config.as_number("alpha", item(rope, "alpha")))};
  const bool gemma4 = config.model_type() == "gemma4_text", proportional = gemma4 && kind && *kind == "proportional";
  config.check(!gemma4 || proportional || part.is_null() || number_in(part) == 1.0,
               "partial_rotary_factor = ", quoted(part),
               " in config.json is only supported for rope_type 'proportional'");
  config.check(proportional || (kind && contains(kRopeTypes, *kind)), "rope_type ", quoted(type),
               " in config.json is not supported; from_hf knows 'default', 'linear', 'dynamic', 'yarn', 'llama3', "
               "'longrope'");
  if (*kind == "proportional") {
    RopeScaling scaling;
    scaling.rope_type("proportional")
        .partial_rotary_factor(part.is_null() ? 1 : config.as_number("partial_rotary_factor", part));
    if (!item(rope, "factor").is_null()) scaling.factor(config.as_number("factor", item(rope, "factor")));
    return {base, scaling};
  }
  if (*kind == "linear") {
    const auto factor = config.as_number(text_of({"factor of ", source}), item(rope, "factor"));
    return {base, RopeScaling().rope_type("linear").factor(factor)};
  }
  return {base, naming(config.path(), "its configuration makes no model", kGetFileAgain,
                       [&] { return read_scaling(config, source, *kind, rope); })};
}

HfRope read_rope(const HfSettings& config, const char* source) {
  static const Json kNothing{Json::Object()};
  const Json usual_base{hf_family(config).rope_base};
  const auto& rope = config.is_set(source) ? config.get(source) : kNothing;
  return read_rope_of(config, source, rope, first_set({&config.get("rope_theta"), &usual_base}));
}

std::string rope_option_text(const std::string& word) { return word; }
std::string rope_option_text(double number) { return shown({number}); }
std::string rope_option_text(int64_t number) { return std::to_string(number); }
std::string rope_option_text(bool value) { return value ? "true" : "false"; }
std::string rope_option_text(const std::vector<double>& numbers) {
  std::string text;
  for (const double number : numbers) text += rope_option_text(number) + ' ';
  return text;
}
template <typename T>
std::string rope_option_text(const std::optional<T>& value) {
  return value ? rope_option_text(*value) : "none";
}

bool are_equal(const HfRope& a, const HfRope& b) {
  if (a.base != b.base || a.scaling.has_value() != b.scaling.has_value()) return false;
  if (!a.scaling) return true;
  std::vector<std::string> shown_a, shown_b;
  const auto list = [](std::vector<std::string>& words) {
    return [&](const char*, const auto& option) { words.push_back(rope_option_text(option)); };
  };
  RopeScaling::for_each_option(*a.scaling, list(shown_a));
  RopeScaling::for_each_option(*b.scaling, list(shown_b));
  return shown_a == shown_b;
}

}  // namespace

HfRope hf_rope(const HfSettings& config) {
  constexpr const char *kNew = "rope_parameters", *kOld = "rope_scaling";
  if (!config.is_set(kNew)) return read_rope(config, kOld);
  auto found = read_rope(config, kNew);
  if (!config.is_set(kOld)) return found;
  config.check(are_equal(found, read_rope(config, kOld)),
               "rope_parameters and rope_scaling in config.json say different things (", quoted(config.get(kNew)), ", ",
               quoted(config.get(kOld)), "); leave out the wrong one");
  return found;
}

HfRopeByKind hf_rope_by_kind(const HfSettings& config, double usual_full, double usual_sliding) {
  static const Json kNothing{Json::Object()};
  const Json kFullBase{usual_full}, kSlidingBase{usual_sliding};
  constexpr const char *kNew = "rope_parameters", *kOld = "rope_scaling";
  const auto& kinds = config.get(kNew);
  const auto &full_base = first_set({&config.get("rope_theta"), &kFullBase}),
             &sliding_base = first_set({&config.get("rope_local_base_freq"), &kSlidingBase});
  const auto* old = &kNothing;
  if (config.is_set(kOld)) old = &config.get(kOld);
  if (!is_set(kinds)) {
    return {read_rope_of(config, kOld, *old, full_base), {config.as_number("rope_local_base_freq", sliding_base), {}}};
  }
  config.refuse_if_set(kOld);  // beside rope_parameters
  const auto &full = item(kinds, "full_attention"), &sliding = item(kinds, "sliding_attention");
  config.check(full.as<Json::Object>() && sliding.as<Json::Object>(), kNew, " in config.json is ", quoted(kinds),
               ", wants an object with full_attention and sliding_attention");
  return {read_rope_of(config, kNew, full, full_base), read_rope_of(config, kNew, sliding, sliding_base)};
}

const Json& hf_rope_member(const HfSettings& config, const char* name) {
  const auto& newer = item(config.get("rope_parameters"), name);
  return newer.is_null() ? item(config.get("rope_scaling"), name) : newer;
}

double hf_rotated_part(const HfSettings& config, double usual) {
  const Json kUsual{usual};
  const auto& member = hf_rope_member(config, "partial_rotary_factor");
  const Json* value = member.is_null() ? &config.get("partial_rotary_factor") : &member;
  const auto part = config.as_number("partial_rotary_factor", value->is_null() ? kUsual : *value);
  config.check(part <= 1, "partial_rotary_factor in config.json is ", quoted(*value), ", wants 1 at most");
  return part;
}

}  // namespace attnpack
