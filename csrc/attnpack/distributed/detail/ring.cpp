#include <ATen/core/grad_mode.h>
#include <attnpack/core/check.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/pieces.h>
#include <attnpack/distributed/detail/sizes.h>
#include <attnpack/ops/merge_states.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace attnpack::distributed {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A piece of a rank's rows or keys, and where it begins among them.
struct LocalPiece {
  Piece piece;
  int64_t start;

  at::Tensor of(const at::Tensor& x) const { return x.narrow(2, start, piece.stop - piece.start); }
};

std::vector<LocalPiece> local_pieces(int64_t rank, int64_t length, const Group& group, Layout layout,
                                     const char* name) {
  std::vector<LocalPiece> found;
  int64_t start = 0;
  for (const auto& piece : pieces(layout, length, group->getSize(), rank, name)) {
    found.push_back({piece, start});
    start += piece.stop - piece.start;
  }
  return found;
}

// Pieces that see each other. `first`: the rows attend for the first time.
struct Pair {
  size_t number;  // of the rows among this rank's pieces
  LocalPiece rows, keys;
  bool first;
};

// The settings of all rounds. The rules have no sinks: these are a tensor of their own, for a gradient.
struct Ring : torch::CustomClassHolder {
  Ring(AttentionOptions given, Group of, Layout placed)
      : rules(std::move(given)), group(std::move(of)), layout(placed) {
    rules.sinks(std::nullopt);
  }

  // Calls each(rank that a part comes from, part), the own one first; the next part travels meanwhile. Returns the part
  // that comes last.
  template <typename Each>
  at::Tensor rounds(const at::Tensor& local, const Each& each) const {
    const int64_t ranks = group->getSize(), rank = group->getRank();
    auto current = local;
    for (int64_t step = 0; step < ranks; ++step) {
      std::function<at::Tensor()> coming;
      if (step + 1 < ranks) coming = pass_on(current, group);
      each((rank - step + ranks) % ranks, current);
      if (coming) current = coming();
    }
    return current;
  }

  // Rows attend for the first time to the keys at their own place, even if they see none of them: so every row has a
  // state, and sinks join it once.
  std::vector<Pair> pairs(int64_t source, int64_t num_rows, int64_t num_keys) const {
    std::vector<Pair> found;
    const auto rows = local_pieces(group->getRank(), num_rows, group, layout, "query");
    const auto keys = local_pieces(source, num_keys, group, layout, "key");
    for (size_t i = 0; i < rows.size(); ++i) {
      for (size_t turn = 0; turn < keys.size(); ++turn) {
        const size_t j = turn == 0 ? i : turn == i ? 0 : turn;  // the keys at the rows' place before the others
        const bool first = source == group->getRank() && i == j;
        if (first || sees(rules, rows[i].piece, keys[j].piece)) found.push_back({i, rows[i], keys[j], first});
      }
    }
    return found;
  }

  // The rules of a pair.
  AttentionOptions rules_of(const Pair& pair, const at::Tensor& sinks) const {
    auto local = rules;
    if (pair.first && sinks.defined()) local.sinks(sinks);
    return local;
  }

  AttentionOptions rules;
  Group group;
  Layout layout;
};

// No rows of a part, in the shape of rows [B, H, L, ...] to which they are joined. A rank that sees nothing of the part
// that comes last needs it all the same: torch.compile drops a collective if no output depends on it, and other ranks
// then wait for this one.
at::Tensor no_rows_of(const at::Tensor& part, const at::Tensor& rows) {
  auto sizes = rows.sym_sizes().vec();
  sizes[2] = 0;
  return part.narrow(2, 0, 0).reshape_symint(sizes).to(rows.scalar_type());
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static variable_list forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const std::optional<at::Tensor>& given,
                               const c10::intrusive_ptr<Ring>& ring) {
    const auto sinks = given.value_or(at::Tensor());
    const auto exact = at::promote_types(query.scalar_type(), at::kFloat);
    std::vector<std::optional<std::tuple<at::Tensor, at::Tensor>>> states(2);
    const auto last = ring->rounds(at::cat({key, value}, -1), [&](int64_t source, const at::Tensor& both) {
      for (const auto& pair : ring->pairs(source, size_of(query, 2), size_of(key, 2))) {
        const auto kv = pair.keys.of(both);
        const auto [out, lse] = attend_piece(pair.rows.of(query), kv.narrow(-1, 0, size_of(key, -1)),
                                             kv.narrow(-1, size_of(key, -1), size_of(value, -1)),
                                             ring->rules_of(pair, sinks), pair.rows.piece, pair.keys.piece);
        auto& state = states[pair.number];
        state = state ? merge_states(std::get<0>(*state), std::get<1>(*state), out.to(exact), lse)
                      : std::make_tuple(out.to(exact), lse);
      }
    });
    std::vector<at::Tensor> outs, lses;
    for (const auto& state : states) {
      if (!state) continue;
      outs.push_back(std::get<0>(*state));
      lses.push_back(std::get<1>(*state));
    }
    outs.push_back(no_rows_of(last, outs.front()));
    const auto out = at::cat(outs, 2).to(query.scalar_type()), lse = at::cat(lses, 2);
    context->save_for_backward({query, key, value, sinks, out, lse});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    context->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    ATTNPACK_CHECK(!at::GradMode::is_enabled(),
                   "create_graph: got true for the backward of a ring over several processes, want false: second "
                   "derivatives are not supported there; take the method 'allgather' or 'ulysses'");
    const auto saved = context->get_saved_variables();
    const auto &query = saved[0], &key = saved[1], &value = saved[2], &sinks = saved[3], &out = saved[4],
               &lse = saved[5];
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(context->saved_data["ring"].toCapsule());
    const auto exact = at::promote_types(query.scalar_type(), at::kFloat);
    const auto grad_out = grads[0].defined() ? grads[0] : at::zeros_like(out);
    const auto zeros = [&](const at::Tensor& x) { return at::zeros_like(x, x.options().dtype(exact)); };
    const auto grad_query = zeros(query);
    at::Tensor grad_sinks;
    std::function<at::Tensor()> arriving;
    const auto last = ring->rounds(at::cat({key, value}, -1), [&](int64_t source, const at::Tensor& both) {
      const auto grad_both = zeros(both);
      for (const auto& pair : ring->pairs(source, size_of(query, 2), size_of(key, 2))) {
        const auto kv = pair.keys.of(both);
        const RowsBefore before{pair.rows.of(query), pair.rows.of(out), pair.rows.of(lse), pair.rows.of(grad_out),
                                grads[1].defined() ? std::optional(pair.rows.of(grads[1])) : std::nullopt};
        const auto part = (query.is_cpu() ? backward_by_kernel : backward_by_join)(
            before, kv.narrow(-1, 0, size_of(key, -1)), kv.narrow(-1, size_of(key, -1), size_of(value, -1)),
            ring->rules_of(pair, sinks), pair.rows.piece, pair.keys.piece);
        pair.rows.of(grad_query).add_(part.query);
        pair.keys.of(grad_both).add_(at::cat({part.key, part.value}, -1));
        if (part.sinks.defined()) grad_sinks = grad_sinks.defined() ? grad_sinks + part.sinks : part.sinks;
      }
      if (arriving) grad_both.add_(arriving());  // what the ranks before added to this part's gradient
      arriving = pass_on(grad_both, ring->group);
    });
    const auto grad_both = arriving().to(key.scalar_type());
    return {at::cat({grad_query, no_rows_of(last, grad_query)}, 2).to(query.scalar_type()),
            grad_both.narrow(-1, 0, size_of(key, -1)),
            grad_both.narrow(-1, size_of(key, -1), size_of(value, -1)),
            grad_sinks,
            {}};
  }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> attend_ring(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                               const AttentionOptions& rules, const Group& group, Layout layout) {
  const auto results =
      RingAttention::apply(query, key, value, rules.sinks(), c10::make_intrusive<Ring>(rules, group, layout));
  return {results[0], results[1]};
}

}  // namespace attnpack::distributed
