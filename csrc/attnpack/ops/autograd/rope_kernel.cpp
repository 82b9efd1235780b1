#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/detail/rope_args.h>
#include <attnpack/ops/rope.h>

namespace attnpack {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;

// The transpose of a rotation is the rotation by the opposite angle, so it can be differentiated any number of times.
struct RopeBackward : torch::autograd::Node {
  RopeBackward(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved)
      : Node(torch::autograd::collect_next_edges(x)), cos_(cos, false), sin_(sin, false), interleaved_(interleaved) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    if (!grads[0].defined()) return {Tensor()};
    return {apply_rope(grads[0], cos_.unpack(), sin_.unpack().neg(), interleaved_)};
  }
  void release_variables() override {
    cos_.reset_data();
    sin_.reset_data();
  }
  std::string name() const override { return "RopeBackward"; }

 private:
  SavedVariable cos_, sin_;
  bool interleaved_;
};

Tensor apply_rope_autograd(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  // Gradients of the tables are rarely needed: the formula computes them.
  if (wants_formula({&x, &cos, &sin}) || torch::autograd::compute_requires_grad(cos, sin))
    return rope_formula(x, cos, sin, interleaved);
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    out = apply_rope(x, cos, sin, interleaved);
  }
  if (torch::autograd::compute_requires_grad(x))
    torch::autograd::set_history(out, make_node<RopeBackward>(x, cos, sin, interleaved));
  return out;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) { m.impl("apply_rope", attnpack::apply_rope_autograd); }
