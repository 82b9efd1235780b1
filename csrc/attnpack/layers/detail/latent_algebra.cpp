#include <attnpack/layers/detail/latent_algebra.h>

#include <ATen/ATen.h>

namespace attnpack {

using at::Tensor;
using c10::SymInt;

namespace {

// kv_b as [H, N + V, C].
Tensor by_head(const Tensor& kv_b, const SymInt& num_heads) { return kv_b.unflatten_symint(0, {num_heads, -1}); }

// x [B, H, L, I] times weight [H, I, O] -> [B, H, L, O]. The product runs over heads first, so that no weight is copied
// per sequence.
Tensor multiply_by_head(const Tensor& x, const Tensor& weight) {
  const SymInt batch = x.sym_size(0), length = x.sym_size(2);
  const Tensor rows = x.transpose(0, 1).reshape_symint({x.sym_size(1), batch * length, x.sym_size(3)});
  return at::bmm(rows, weight).unflatten_symint(1, {batch, length}).transpose(0, 1);
}

}  // namespace

Tensor fold_query(const Tensor& query, const Tensor& kv_b) {
  return multiply_by_head(query, by_head(kv_b, query.sym_size(1)).narrow_symint(1, 0, query.sym_size(3)));
}

Tensor unfold_output(const Tensor& context, const Tensor& kv_b, const SymInt& v_dim) {
  const Tensor weight = by_head(kv_b, context.sym_size(1));
  return multiply_by_head(context, weight.narrow_symint(1, weight.sym_size(1) - v_dim, v_dim).transpose(1, 2));
}

std::tuple<Tensor, Tensor> expand_latents(const Tensor& latents, const Tensor& kv, const SymInt& latent_dim,
                                          const SymInt& num_heads, const SymInt& v_dim) {
  const Tensor heads = kv.unflatten_symint(-1, {num_heads, -1}).transpose(1, 2);  // [B, H, K, N + V]
  const SymInt nope = heads.sym_size(3) - v_dim, rotated = latents.sym_size(3) - latent_dim;
  const Tensor key = heads.narrow_symint(3, 0, nope), value = heads.narrow_symint(3, nope, v_dim);
  if (rotated == 0) return {key, value};
  auto shape = heads.sym_sizes().vec();
  shape.back() = rotated;
  return {at::cat({key, latents.narrow_symint(3, latent_dim, rotated).expand_symint(shape)}, -1), value};
}

std::tuple<Tensor, Tensor> fold_weights(const Tensor& query, const Tensor& kv_b, const Tensor& out, int64_t num_heads) {
  const at::NoGradGuard no_grad;
  const int64_t v_dim = out.size(1) / num_heads, nope = kv_b.size(0) / num_heads - v_dim;
  const Tensor up = by_head(kv_b.to(at::kDouble), num_heads);     // [H, N + V, C]
  const Tensor rows = by_head(query.to(at::kDouble), num_heads);  // [H, N + R, I]
  const Tensor key = up.narrow(1, 0, nope), value = up.narrow(1, nope, v_dim);
  const Tensor folded = at::bmm(key.transpose(1, 2), rows.narrow(1, 0, nope));  // [H, C, I]
  const Tensor both = at::cat({folded, rows.narrow(1, nope, rows.size(1) - nope)}, 1);
  const Tensor columns = out.to(at::kDouble).unflatten(1, {num_heads, v_dim}).transpose(0, 1);  // [H, E, V]
  const Tensor joined = at::bmm(columns, value).transpose(0, 1);                                // [E, H, C]
  return {both.flatten(0, 1).to(query.scalar_type()), joined.flatten(1).to(out.scalar_type())};
}

bool absorbed_is_cheaper(const SymInt& q_len, const SymInt& kv_len, const SymInt& nope_dim, const SymInt& v_dim,
                         const SymInt& latent_dim) {
  const SymInt both = nope_dim + v_dim;
  return (kv_len - q_len) * latent_dim * both > q_len * kv_len * (latent_dim * 2 - both);
}

}  // namespace attnpack
