#include <attnpack/modules/block.h>

#include <c10/util/SmallVector.h>

#include <cmath>
#include <functional>
#include <tuple>

#include <attnpack/cache/cross_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/dropout.h>
#include <attnpack/modules/norm.h>

namespace attnpack {

namespace {

// The output of attention or of the feed-forward, as the block adds it to x.
template <typename Block>
at::Tensor added(const Block& block, const at::Tensor& t) {
  const auto kept = dropped(t, block.dropout, block);
  return block.residual_scale == 1 ? kept : kept * block.residual_scale;
}

using Layer = std::function<at::Tensor(const at::Tensor&)>;

// A norm, and the layer beside it.
struct ResidualPart {
  const Part<TokenModule>& norm;
  Layer layer;
};

// For each part in turn x + f(norm(x)), or norm(x + f(x)). A sum and the norm that reads it are one call.
template <typename Block>
at::Tensor run_parts(const Block& block, at::Tensor x, at::ArrayRef<ResidualPart> parts) {
  if (!block.pre_norm) {
    for (const auto& part : parts) x = std::get<1>(part.norm->forward_sum(x, added(block, part.layer(x))));
    return x;
  }
  auto normed = parts.front().norm->forward(x);
  for (size_t i = 1; i < parts.size(); ++i)
    std::tie(x, normed) = parts[i].norm->forward_sum(x, added(block, parts[i - 1].layer(normed)));
  return x + added(block, parts.back().layer(normed));
}

// Returns the options after a check that their parts are given and fit each other.
template <typename Options>
const Options& checked(const Options& options) {
  ATTNPACK_CHECK(options.attention(), "attention: got none, want an attention module");
  ATTNPACK_CHECK(options.feed_forward(), "feed_forward: got none, want a module such as FeedForward");
  check_dropout("dropout", options.dropout());
  ATTNPACK_CHECK(std::isfinite(options.residual_scale()), "residual_scale: got ", options.residual_scale(),
                 ", want a finite number, 1 for none");
  const auto embed_dim = options.attention()->embed_dim();
  check_output_width(options.attention()->out_dim(), embed_dim);
  check_part_width("feed_forward", options.feed_forward()->embed_dim().value_or(embed_dim), embed_dim);
  return options;
}

template <typename Options>
Part<TokenModule> norm_beside(const Options& options) {
  const auto& attention = options.attention();
  return make_norm(options.norm(),
                   NormOptions(attention->embed_dim()).eps(options.eps()).factory(attention->factory()));
}

// The positions of x for the queries of cross-attention, which knows nothing of what was before x. None: 0..L-1, or
// nobody asks.
std::optional<at::Tensor> query_positions(const AttentionModule& cross, const at::Tensor& x,
                                          const DecoderBlockInputs& inputs) {
  if (!cross.rotates()) return std::nullopt;
  if (inputs.positions() || !inputs.cache()) return inputs.positions();
  const auto past = past_lengths(inputs.cache()->lengths(), x);
  return past ? std::make_optional(token_positions(x, std::nullopt, past)) : std::nullopt;
}

}  // namespace

EncoderBlockImpl::EncoderBlockImpl(const EncoderBlockOptions& options)
    : pre_norm(checked(options).pre_norm()),
      dropout(options.dropout()),
      residual_scale(options.residual_scale()),
      self_attn(options.attention()),
      mlp(options.feed_forward()),
      input_layernorm(norm_beside(options)),
      post_attention_layernorm(norm_beside(options)) {
  register_parts();
}

at::Tensor EncoderBlockImpl::forward(const at::Tensor& x, const EncoderInputs& inputs) {
  check_input("x", x, self_attn->embed_dim(), {});
  const auto attend = [&](const at::Tensor& t) {
    return self_attn->forward(
        t, AttentionInputs().mask(inputs.mask()).positions(inputs.positions()).kv_lens(inputs.kv_lens()));
  };
  const ResidualPart parts[] = {{input_layernorm, attend},
                                {post_attention_layernorm, [&](const at::Tensor& t) { return mlp->forward(t); }}};
  return run_parts(*this, x, parts);
}

DecoderBlockImpl::DecoderBlockImpl(const DecoderBlockOptions& options)
    : pre_norm(checked(options).pre_norm()),
      dropout(options.dropout()),
      residual_scale(options.residual_scale()),
      layout(options.layout()),
      kv_from(options.kv_from()),
      self_attn(options.attention()),
      cross_attn(options.cross_attention()),
      tail(options.tail()),
      mlp(options.feed_forward()) {
  check_layout(layout, pre_norm, bool(cross_attn));
  if (layout != "output") input_layernorm = norm_beside(options);
  if (layout != "parallel") post_attention_layernorm = norm_beside(options);
  if (layout == "sandwich") pre_feedforward_layernorm = norm_beside(options);
  if (layout == "sandwich" || layout == "output") post_feedforward_layernorm = norm_beside(options);
  if (cross_attn) {
    check_part_width("cross_attention", cross_attn->embed_dim(), self_attn->embed_dim());
    check_part_width("cross_attention", cross_attn->out_dim(), self_attn->embed_dim());
    cross_attention_layernorm = norm_beside(options);
  }
  register_parts();
}

at::Tensor DecoderBlockImpl::forward(const at::Tensor& x, const DecoderBlockInputs& inputs) {
  const auto cross = std::dynamic_pointer_cast<CrossCache>(inputs.cross_cache());
  check_cross_cache(bool(cross), bool(inputs.cross_cache()), bool(cross_attn));
  check_self_cache(bool(std::dynamic_pointer_cast<CrossCache>(inputs.cache())));
  check_cross_attention(bool(cross_attn), inputs.context() || (cross && cross->filled()));
  check_input("x", x, self_attn->embed_dim(), {});
  if (inputs.context()) check_lengths("context_lens", inputs.context_lens(), *inputs.context());
  const auto attend = [&](const at::Tensor& t) {
    auto given = AttentionInputs()
                     .causal(true)
                     .mask(inputs.mask())
                     .cache(inputs.kv_from ? nullptr : inputs.cache())
                     .positions(inputs.positions())
                     .kv_lens(inputs.kv_lens())
                     .kv_from(inputs.kv_from);
    given.kv = inputs.kv;
    return self_attn->forward(t, given);
  };
  const auto out = run(x, inputs, attend);
  if (!tail) check_layer_input(inputs.layer_input.has_value(), false);
  return tail ? tail->forward(out, inputs.layer_input) : out;
}

at::Tensor DecoderBlockImpl::run(const at::Tensor& x, const DecoderBlockInputs& inputs,
                                 const std::function<at::Tensor(const at::Tensor&)>& attend) {
  if (layout) return run_layout(x, attend);
  std::optional<at::Tensor> positions;  // before self-attention appends
  if (cross_attn) {
    check_cross_distances(cross_attn->counts_distances(), bool(inputs.cache()));
    positions = query_positions(*cross_attn.operator->(), x, inputs);
  }
  c10::SmallVector<ResidualPart, 3> parts{{input_layernorm, attend}};
  if (cross_attn) {
    parts.push_back({cross_attention_layernorm, [&](const at::Tensor& t) {
                       return cross_attn->forward(t, AttentionInputs()
                                                         .context(inputs.context())
                                                         .cache(inputs.cross_cache())
                                                         .mask(inputs.context_mask())
                                                         .positions(positions)
                                                         .kv_lens(inputs.context_lens()));
                     }});
  }
  parts.push_back({post_attention_layernorm, [&](const at::Tensor& t) { return mlp->forward(t); }});
  return run_parts(*this, x, parts);
}

at::Tensor DecoderBlockImpl::run_layout(const at::Tensor& x,
                                        const std::function<at::Tensor(const at::Tensor&)>& attend) {
  const auto normed = [](const Part<TokenModule>& norm, const at::Tensor& t) { return norm ? norm->forward(t) : t; };
  const auto first = normed(input_layernorm, x);
  if (*layout == "parallel" || *layout == "parallel_two") {
    const auto second = *layout == "parallel" ? first : post_attention_layernorm->forward(x);
    const auto attended = x + added(*this, attend(first));
    return attended + added(*this, mlp->forward(second));
  }
  const auto h = x + added(*this, post_attention_layernorm->forward(attend(first)));
  return h + added(*this, post_feedforward_layernorm->forward(mlp->forward(normed(pre_feedforward_layernorm, h))));
}

}  // namespace attnpack
