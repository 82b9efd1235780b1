#include <attnpack/modules/feed_forward.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>

namespace attnpack {

void FeedForwardImpl::reset() {
  const auto& o = options;
  ATTNPACK_CHECK(o.activation() == "swiglu" || o.activation() == "gelu", "activation: got '", o.activation(),
                 "', want 'swiglu' or 'gelu'");
  check_size("embed_dim", o.embed_dim());
  check_size("hidden_dim", o.hidden_dim());
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(LinearOptions(in, out).bias(o.bias()).factory(o.factory())));
  };
  if (o.activation() == "swiglu") gate_proj = linear("gate_proj", o.embed_dim(), o.hidden_dim());
  up_proj = linear("up_proj", o.embed_dim(), o.hidden_dim());
  down_proj = linear("down_proj", o.hidden_dim(), o.embed_dim());
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  check_tokens("x", x, options.embed_dim(), up_proj->weight);
  if (!gate_proj) return down_proj(at::gelu(up_proj(x)));
  const auto inner = forward_all(x, {gate_proj.get(), up_proj.get()});
  return down_proj(at::silu(inner[0]) * inner[1]);
}

void FeedForwardImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::FeedForward", options);
}

}  // namespace attnpack
