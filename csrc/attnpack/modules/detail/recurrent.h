#pragma once

#include <attnpack/modules/recurrent/recurrent_module.h>

#include <array>
#include <functional>
#include <vector>

namespace attnpack {

// The output of a recurrent layer, and the states after it.
struct Recurred {
  at::Tensor out;
  RecurrentStates states;
};

// The shapes of the states of one sequence, empty for a part that the layer does not have.
struct StateShapes {
  std::vector<int64_t> conv, state;
};

// Runs call on the states that the cache of inputs holds, and puts those that it gives there. Raises for inputs that a
// recurrent layer does not take.
at::Tensor with_states(const char* module, const at::Tensor& x, const AttentionInputs& inputs,
                       const StateShapes& shapes, const std::function<Recurred(const RecurrentInputs&)>& call);

// Refuses what a recurrent layer does not take, by whether it is given.
void check_recurrent_call(const char* module, bool context, bool mask, bool not_causal, bool kv_from, bool key_index);

// A size that has no default.
int64_t required_size(const char* name, const std::optional<int64_t>& size);

// log(x) for x drawn from (least, most), at first.
at::Tensor log_of_uniform_(const at::Tensor& made, double least, double most);

// x for which softplus(x) is log-uniform between 0.001 and 0.1, at first: with a bias of 1 a layer would forget within
// a token what it is to learn to keep (Mamba-2, Dao and Gu 2024; the published delta layers begin so too).
at::Tensor set_first_steps_(const at::Tensor& dt_bias);

}  // namespace attnpack
