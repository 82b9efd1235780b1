#include <attnpack/modules/attention/projected_attention.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/print_options.h>

namespace attnpack {

void ProjectedAttentionImpl::reset() {
  check_settings(options.window(), options.softcap(), options.dropout(), options.scale());
  resolve_head_dim(0, options.num_heads(), options.head_dim());
  check_heads(options.num_heads(), options.num_kv_heads(), options.head_map());
  if (options.rope()) {
    check_rope_dim(options.rope(), options.head_dim(), text_of({"head_dim ", options.head_dim()}));
    rope = register_module("rope", RotaryEmbedding(options.rope()->options));
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ProjectedAttentionImpl::heads(const at::Tensor& q, const at::Tensor& k,
                                                                             const at::Tensor& v) const {
  const auto head_dim = options.head_dim();
  check_input("q", q, options.num_heads() * head_dim, {});
  check_input("k", k, options.num_kv_heads() * head_dim, q);
  check_input("v", v, options.num_kv_heads() * head_dim, q);
  check_keys_and_values(q, k, v);
  return {split_heads(q, options.num_heads(), head_dim), split_heads(k, options.num_kv_heads(), head_dim),
          split_heads(v, options.num_kv_heads(), head_dim)};
}

AttendOptions ProjectedAttentionImpl::settings(const at::Tensor& query, const at::Tensor& key,
                                               const AttentionInputs& inputs) const {
  ATTNPACK_CHECK(!inputs.context(), "context: ProjectedAttention is given k and v; leave it out");
  check_projected_cache(bool(cross_cache(inputs)));
  check_no_kv_from("ProjectedAttention", inputs.kv_from() != nullptr);
  auto result = attend_options(options, inputs, is_training(), rope);
  result.cross = !inputs.cache() && query.size(2) != key.size(2);
  return result;
}

at::Tensor ProjectedAttentionImpl::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const AttentionInputs& inputs) {
  auto [query, key, value] = heads(q, k, v);
  return with_cache(
      inputs.cache(), key, value, settings(query, key, inputs),
      [&, &query = query, &key = key, &value = value](const AttendOptions& o) { return attend(query, key, value, o); });
}

std::tuple<at::Tensor, at::Tensor> ProjectedAttentionImpl::forward_with_weights(const at::Tensor& q,
                                                                                const at::Tensor& k,
                                                                                const at::Tensor& v,
                                                                                const AttentionInputs& inputs) {
  auto [query, key, value] = heads(q, k, v);
  return with_cache(inputs.cache(), key, value, settings(query, key, inputs),
                    [&, &query = query, &key = key, &value = value](const AttendOptions& o) {
                      return attend_with_weights(query, key, value, o);
                    });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ProjectedAttentionImpl::project(const at::Tensor& q, const at::Tensor& k,
                                                                               const at::Tensor& v,
                                                                               const AttentionInputs& inputs) {
  auto [query, key, value] = heads(q, k, v);
  auto [rotated_q, rotated_k] = rotate(query, key, settings(query, key, inputs));
  return {rotated_q, rotated_k, value};
}

void ProjectedAttentionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::ProjectedAttention", options);
}

}  // namespace attnpack
