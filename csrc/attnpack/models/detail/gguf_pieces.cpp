#include <attnpack/models/detail/gguf_pieces.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_config.h>

namespace attnpack {

namespace {

using Shape = std::vector<int64_t>;
using Words = std::vector<std::string>;

const GgufNames kTop{{"token_embd", "model.embed_tokens"},
                     {"position_embd", "model.embed_positions"},
                     {"output_norm", "model.norm"},
                     {"output", "lm_head"}};
const GgufNames kLlama{{"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
                       {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
                       {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
                       {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
                       {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
                       {"ffn_down", "mlp.down_proj"}};
// Projections whose rows follow each other, in some architectures or by the converter's --fuse-qkv and
// --fuse-gate-up-exps.
const Words kQkv{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
const Words kFusedExperts{"mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"};
// Weights of a model, each expert's on its own, so that a lie costs little; Kimi K2 has 70,000.
constexpr size_t kMostPieces = 1 << 18;

// A name in the file: "blk.3.attn_q.weight" is attn_q.weight of layer 3.
struct StoredName {
  std::string layer;  // empty outside of layers
  std::string rest, module, parameter;

  explicit StoredName(const std::string& name) : rest(name) {
    const std::string prefix = "blk.";
    const auto end = name.find('.', prefix.size());
    if (name.starts_with(prefix) && end != name.npos && end > prefix.size()) {
      const auto number = name.substr(prefix.size(), end - prefix.size());
      const bool digits = std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
      if (digits) layer = number, rest = name.substr(end + 1);
    }
    const auto dot = rest.rfind('.');
    module = dot == rest.npos ? "" : rest.substr(0, dot);
    parameter = dot == rest.npos ? rest : rest.substr(dot + 1);
  }
  std::string theirs(const std::string& name) const {
    return layer.empty() ? name : text_of({"blk.", layer, ".", name});
  }
  std::string ours(const std::string& name) const {
    return layer.empty() ? name : text_of({"model.layers.", layer, ".", name});
  }
};

class PieceFinder {
 public:
  PieceFinder(const GgufSettings& file, const GgufFamily& family, const GgufSizes& sizes)
      : file_(file), family_(family), sizes_(sizes), further_(further_layers(file, family)), names_(family.names) {
    if (family.recipes) {
      for (auto& recipe : family.recipes(file)) {
        const auto shared = std::make_shared<const GgufRecipe>(std::move(recipe));
        for (const auto& source : shared->sources) recipes_[source] = shared;
      }
    }
    if (file.file().has("blk.0.attn_norm_2.weight")) {  // of Falcon-40B, in which attn_norm is the feed-forward's
      names_["attn_norm"] = "post_attention_layernorm";
      names_["attn_norm_2"] = "input_layernorm";
    }
    names_.insert(kLlama.begin(), kLlama.end());
  }

  GgufPieces find() {
    static const std::set<std::string> no_weights{kRopeFreqs, "rope_factors_short.weight", "rope_factors_long.weight"};
    const auto unread = family_.unread ? family_.unread(file_) : std::set<std::string>();
    const auto is_unread = [&](const std::string& name) {
      const auto next = unread.upper_bound(name);
      return next != unread.begin() && name.starts_with(*std::prev(next));
    };
    for (const auto& [name, tensor] : file_.file().tensors()) {
      const StoredName stored(name);
      if (!no_weights.count(name) && !is_further(stored) && !is_unread(name)) add(name, stored, tensor.shape);
    }
    return std::move(pieces_);
  }

 private:
  // Whether it is a tensor of a layer behind the last, which only drafts tokens.
  bool is_further(const StoredName& stored) const {
    const auto layer = std::strtoll(stored.layer.c_str(), nullptr, 10);
    return std::to_string(layer) == stored.layer && layer >= sizes_.num_layers && layer - sizes_.num_layers < further_;
  }

  void add(const std::string& name, const StoredName& stored, const Shape& shape) {
    if (const auto made = recipes_.find(stored.rest); made != recipes_.end())
      return add_made(name, stored, made->second);
    if (stored.layer.empty()) {
      const auto top = kTop.find(stored.module);
      check_place(top != kTop.end(), name);
      return put(top->second + "." + stored.parameter, {shape, {name}});
    }
    const auto found = names_.find(stored.module);
    const auto fused = family_.fused.find(stored.module);
    if (fused != family_.fused.end()) return add_rows(name, stored, fused->second, shape);
    if (stored.module == "attn_qkv" && found == names_.end()) return add_rows(name, stored, kQkv, shape);
    if (stored.module == "ffn_gate_up_exps" && names_.count("ffn_gate_exps") && shape.size() == 3)
      return add_experts(name, stored, kFusedExperts, shape);
    check_place(found != names_.end(), name);
    const auto& target = found->second;
    if (target.find('*') != target.npos) return add_experts(name, stored, {target}, shape);
    // These are parameters of the module, not of a child.
    const bool whole = target.ends_with("sinks") || target.ends_with("correction_bias");
    put(stored.ours(whole ? target : target + "." + stored.parameter), {shape, {name}});
  }

  void check_place(bool has_one, const std::string& name) const {
    file_.check(has_one, "tensor ", excerpt(name), " has no place in the architecture ", file_.architecture(),
                kOtherModel);
  }

  void put(const std::string& name, GgufPiece piece) {
    const auto [place, is_new] = pieces_.try_emplace(name, std::move(piece));
    file_.check(is_new, "has ", excerpt(place->second.sources[0]), " and another tensor for the weight ", excerpt(name),
                kDamaged);
    file_.check(pieces_.size() <= kMostPieces, "its tensors hold more than ", kMostPieces, " weights", kDamaged);
  }

  // They come with the first of the recipe's sources; the others give none.
  void add_made(const std::string& name, const StoredName& stored, const std::shared_ptr<const GgufRecipe>& recipe) {
    Words sources;
    for (const auto& source : recipe->sources) {
      sources.push_back(stored.theirs(source));
      file_.check(file_.file().has(sources.back()), excerpt(name), " comes with ", excerpt(sources.back()),
                  ", which the file lacks; ", kGetFileAgain);
    }
    if (name != sources[0]) return;
    const auto shapes = shapes_made(*recipe, sources);
    for (size_t i = 0; i < shapes.size(); ++i) put(stored.ours(recipe->targets[i]), {shapes[i], sources, 0, recipe, i});
  }

  std::vector<Shape> shapes_made(const GgufRecipe& recipe, const Words& sources) const {
    std::vector<at::Tensor> stored;
    std::string given;
    std::vector<Shape> shapes;
    for (const auto& source : sources) {
      const auto& shape = file_.file().tensor(source).shape;
      given += text_of({given.empty() ? "" : ", ", excerpt(source), " has shape ", at::IntArrayRef(shape)});
    }
    bool fits = true;
    try {
      for (const auto& source : sources)
        stored.push_back(at::empty(file_.file().tensor(source).shape, at::TensorOptions().device(at::kMeta)));
      for (const auto& made : recipe.make(stored)) shapes.push_back(made.sizes().vec());
    } catch (const std::exception&) {  // of meta tensors also other errors than torch's, where Python computes them
      fits = false;
    }
    file_.check(fits, given, ", which its configuration does not fit; ", kGetFileAgain);
    return shapes;
  }

  // Two or three projections, whose rows follow each other.
  void add_rows(const std::string& name, const StoredName& stored, const Words& targets, const Shape& shape) {
    const auto of_keys = sizes_.num_kv_heads * sizes_.head_dim;
    const Shape rows = targets.size() == 2 ? Shape{shape[0] / 2, shape[0] / 2}
                                           : Shape{sizes_.num_heads * sizes_.head_dim, of_keys, of_keys};
    int64_t all = 0;
    std::string listed;
    for (size_t i = 0; i < rows.size(); ++i) {
      all += rows[i];
      listed += (i == 0 ? "" : ", ") + targets[i].substr(targets[i].rfind('.') + 1);
    }
    file_.check(all == shape[0], excerpt(name), " has ", shape[0], " rows, its configuration asks for ", all, ": ",
                listed, kDamaged);
    int64_t first = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      auto own = shape;
      own[0] = rows[i];
      put(stored.ours(targets[i] + "." + stored.parameter), {own, {name}, first});
      first += rows[i];
    }
  }

  // A tensor of all experts, of one projection or of two whose rows follow each other.
  void add_experts(const std::string& name, const StoredName& stored, const Words& targets, const Shape& shape) {
    const auto count = static_cast<int64_t>(targets.size());
    const bool fits = shape.size() >= 2 && shape[0] <= kMostExperts && (count == 1 || shape[1] % count == 0) &&
                      std::find(shape.begin(), shape.end(), 0) == shape.end();
    file_.check(fits, excerpt(name), " has shape ", at::IntArrayRef(shape), ", wants the experts first, at most ",
                kMostExperts, kDamaged);
    const Shape of_one(shape.begin() + 1, shape.end());
    int64_t each = 1;  // of rows
    for (size_t i = 0; i + 1 < of_one.size(); ++i) each *= of_one[i];
    const auto rows = each / count;
    const auto own = count == 1 ? of_one : Shape{rows, shape.back()};
    for (int64_t expert = 0; expert < shape[0]; ++expert) {
      for (int64_t i = 0; i < count; ++i) {
        auto target = targets[i];
        target.replace(target.find('*'), 1, std::to_string(expert));
        put(stored.ours(target + "." + stored.parameter), {own, {name}, expert * each + i * rows});
      }
    }
  }

  const GgufSettings& file_;
  const GgufFamily& family_;
  const GgufSizes& sizes_;
  int64_t further_;
  GgufNames names_;
  std::map<std::string, std::shared_ptr<const GgufRecipe>> recipes_;
  GgufPieces pieces_;
};

}  // namespace

GgufPieces gguf_pieces(const GgufSettings& file, const GgufFamily& family, const GgufSizes& sizes) {
  return PieceFinder(file, family, sizes).find();
}

}  // namespace attnpack
