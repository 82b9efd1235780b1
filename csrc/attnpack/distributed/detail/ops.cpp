#include <attnpack/cache/detail/rules.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/gather_sequence.h>
#include <attnpack/distributed/detail/group_names.h>
#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/names.h>
#include <attnpack/distributed/detail/rules.h>
#include <attnpack/distributed/detail/sharded_keys.h>
#include <attnpack/distributed/detail/sizes.h>
#include <attnpack/distributed/detail/validate.h>
#include <attnpack/ops/detail/schema.h>
#include <torch/library.h>

// The functions of several processes as composite ops. They take a group by its name, because a graph can hold a name.
// They do not compare the arguments of the ranks.
namespace attnpack::distributed {

namespace {

using at::Tensor;
using c10::string_view;

AttentionOptions options_of(const ScoreRules& rules, const std::optional<Tensor>& kv_lens) {
  const auto options = AttentionOptions().rules(rules).kv_lens(kv_lens);
  refuse_unshared(options);
  return options;
}

Group group_of(string_view name) { return distributed::group_of(std::string(name)); }

std::tuple<Tensor, Tensor> context_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                                string_view group, string_view method, string_view layout,
                                                const std::optional<Tensor>& kv_lens, const ScoreRules& rules) {
  return attend_by(method_of(method), in_autocast(query), in_autocast(key), in_autocast(value), group_of(group),
                   options_of(rules, kv_lens), layout_of(layout));
}

std::tuple<Tensor, Tensor> context_attention_rows_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     string_view group, string_view layout,
                                                     const std::optional<Tensor>& kv_lens, const ScoreRules& rules) {
  return attend_rows(query, key, value, options_of(rules, kv_lens), group_of(group), layout_of(layout));
}

Tensor attend_sharded_keys_op(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& past,
                              string_view group, const std::optional<Tensor>& kv_lens, const ScoreRules& rules) {
  return attend_sharded_keys(query, key, value, past, kv_lens, options_of(rules, std::nullopt), group_of(group));
}

Tensor attend_sharded_latents_op(const Tensor& query, const Tensor& latents, int64_t rotated_dim,
                                 const std::optional<Tensor>& kv_b, int64_t v_dim, const Tensor& past,
                                 string_view group, const std::optional<Tensor>& kv_lens, const ScoreRules& rules) {
  return attend_sharded_latents(query, latents, rotated_dim, kv_b, v_dim, past, kv_lens,
                                options_of(rules, std::nullopt), group_of(group));
}

std::tuple<OptionalTensors, Numbers, Tensor, Tensor> append_share_op(const CacheSnapshot& snapshot, const Tensor& key,
                                                                     const Tensor& value, const Tensor& past,
                                                                     const Tensor& new_lens, int64_t kv_lora_rank,
                                                                     string_view group) {
  const auto cache = snapshot.make();
  const auto [keys, values] = append_share(*cache, key, value, past, new_lens, kv_lora_rank, group_of(group));
  const auto state = cache->state();
  return {state.tensors, state.numbers, keys, values};
}

Tensor held_positions_op(const Tensor& lengths, string_view group, int64_t rank) {
  return held_positions(lengths, rank, group_of(group)->getSize());
}

Tensor shard_sequence_op(const Tensor& x, string_view group, int64_t dim, string_view layout) {
  return shard_sequence(x, group_of(group), dim, layout_of(layout));
}

Tensor sequence_positions_op(const Tensor& rows, string_view group, string_view layout) {
  return positions(layout_of(layout), size_of(rows, 0), group_of(group), rows.device());
}

Tensor unshard_sequence_op(const Tensor& x, string_view group, int64_t dim, string_view layout, bool alike) {
  return gather_sequence(x, group_of(group), dim, layout_of(layout), alike);
}

Tensor copy_to_ranks_op(const Tensor& x, string_view group) { return copied(x, group_of(group)); }

Tensor copy_of_first_rank_op(const Tensor& x, string_view group) { return from_first(x, group_of(group)); }

Tensor sum_over_ranks_op(const Tensor& x, string_view group) { return summed(x, group_of(group)); }

Tensor gather_from_ranks_op(const Tensor& x, string_view group, bool alike) {
  return gathered(x, group_of(group), alike);
}

}  // namespace

}  // namespace attnpack::distributed

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack::distributed;
  m.def(
      "context_attention(Tensor query, Tensor key, Tensor value, str group_name, str method, str layout, "
      "Tensor? kv_lens=None" ATTNPACK_RULES_SCHEMA ") -> (Tensor, Tensor)",
      attnpack::from_schema<context_attention_op>);
  // Over whole keys and values.
  m.def(
      "context_attention_rows(Tensor query, Tensor key, Tensor value, str group_name, str layout, "
      "Tensor? kv_lens=None" ATTNPACK_RULES_SCHEMA ") -> (Tensor, Tensor)",
      attnpack::from_schema<context_attention_rows_op>);
  m.def(
      "attend_sharded_keys(Tensor query, Tensor key, Tensor value, Tensor past, str group_name, "
      "Tensor? kv_lens=None" ATTNPACK_RULES_SCHEMA ") -> Tensor",
      attnpack::from_schema<attend_sharded_keys_op>);
  m.def(
      "attend_sharded_latents(Tensor query, Tensor latents, int rotated_dim, Tensor? kv_b, int v_dim, Tensor past, "
      "str group_name, Tensor? kv_lens=None" ATTNPACK_RULES_SCHEMA ") -> Tensor",
      attnpack::from_schema<attend_sharded_latents_op>);
  m.def(
      "append_share(str kind, Tensor(a!)?[] tensors, SymInt[] numbers, Tensor key, Tensor value, Tensor past, "
      "Tensor new_lens, int kv_lora_rank, str group_name) -> (Tensor(a!)?[], SymInt[], Tensor(a), Tensor(a))",
      attnpack::from_schema<append_share_op>);
  m.def("held_positions(Tensor lengths, str group_name, int rank) -> Tensor", held_positions_op);
  m.def("shard_sequence(Tensor x, str group_name, int dim, str layout) -> Tensor", shard_sequence_op);
  // The positions of this rank's rows [length, ...] in the whole sequence.
  m.def("sequence_positions(Tensor rows, str group_name, str layout) -> Tensor", sequence_positions_op);
  m.def("unshard_sequence(Tensor x, str group_name, int dim, str layout, bool alike) -> Tensor", unshard_sequence_op);
  m.def("copy_to_ranks(Tensor x, str group_name) -> Tensor", copy_to_ranks_op);
  m.def("copy_of_first_rank(Tensor x, str group_name) -> Tensor", copy_of_first_rank_op);
  m.def("sum_over_ranks(Tensor x, str group_name) -> Tensor", sum_over_ranks_op);
  m.def("gather_from_ranks(Tensor x, str group_name, bool alike) -> Tensor", gather_from_ranks_op);
}
