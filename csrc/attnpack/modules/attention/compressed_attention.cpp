#include <attnpack/modules/attention/compressed_attention.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/init.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/ops/rms_norm.h>
#include <attnpack/ops/rope.h>

#include <vector>

namespace attnpack {

namespace {

Linear linear(const CompressedAttentionOptions& o, int64_t in, int64_t out) {
  return Linear(LinearOptions(in, out).bias(false).factory(o.factory()));
}

RMSNorm norm(const CompressedAttentionOptions& o, int64_t dim) {
  return RMSNorm(RMSNormOptions(dim).eps(o.eps()).factory(o.factory()));
}

void check_options(const CompressedAttentionOptions& o) {
  check_size("embed_dim", o.embed_dim());
  check_size("num_heads", o.num_heads());
  for (const auto& [name, size] :
       {std::pair{"head_dim", o.head_dim()}, {"q_lora_rank", o.q_lora_rank()}, {"o_lora_rank", o.o_lora_rank()}}) {
    ATTNPACK_CHECK(size, name, ": got none, want the width that the checkpoint has");
    check_size(name, *size);
  }
  check_size("o_groups", o.o_groups());
  ATTNPACK_CHECK(o.num_heads() % o.o_groups() == 0, "o_groups: got ", o.o_groups(),
                 ", which does not divide num_heads ", o.num_heads(),
                 "; take a divisor, because a group has whole heads");
  check_size("window", o.window());
  check_size("compress_rate", o.compress_rate().value_or(1));
  check_size("top_k", o.top_k().value_or(1));
  check_size("index_heads", o.index_heads().value_or(1));
  check_size("index_head_dim", o.index_head_dim().value_or(1));
  ATTNPACK_CHECK(o.compress_rate() || !o.top_k(), "top_k: got ", o.top_k().value_or(0),
                 " without compress_rate; give how many tokens an entry has too");
  ATTNPACK_CHECK(o.top_k() || (!o.index_heads() && !o.index_head_dim()),
                 "index_heads, index_head_dim: got one without top_k; give how many entries the indexer names too");
  check_settings(std::nullopt, 0.0, 0.0, o.scale());
  ATTNPACK_CHECK(o.rope(), "rope: got none, want a RotaryEmbedding over the last dims of a head");
  const auto width = std::min(*o.head_dim(), o.index_head_dim().value_or(*o.head_dim()));
  check_rope_dim(o.rope(), width, text_of({"head_dim and index_head_dim, the smaller of which is ", width}));
  ATTNPACK_CHECK(!o.rope()->settings.by_length(), "rope: got frequencies that follow the length, want fixed ones: ",
                 "leave out its scaling, or take yarn");
}

}  // namespace

void EntryScorerImpl::reset() {
  weights_proj = register_module("weights_proj", linear(options, options.embed_dim(), *options.index_heads()));
}

void EntryIndexerImpl::reset() {
  const auto& o = options;
  const auto width = *o.index_head_dim();
  kv_proj = register_module("kv_proj", linear(o, o.embed_dim(), 2 * width));
  gate_proj = register_module("gate_proj", linear(o, o.embed_dim(), 2 * width));
  kv_norm = register_module("kv_norm", norm(o, width));
  q_b_proj = register_module("q_b_proj", linear(o, *o.q_lora_rank(), *o.index_heads() * width));
  scorer = register_module("scorer", EntryScorer(o));
  const std::vector<int64_t> sizes{*o.compress_rate(), 2 * width};
  register_parameter("position_bias",
                     allocate("compress_rate, index_head_dim", sizes, position_bias, o.factory()).zero_());
  bind_members();
}

at::Tensor EntryIndexerImpl::forward(const at::Tensor& low, const at::Tensor& x, const EntryRotation& rotation) {
  const auto entries = kv_norm(compress_tokens(kv_proj(x), gate_proj(x), position_bias, true)).unsqueeze(1);
  const auto query = split_heads(q_b_proj(low), *options.index_heads(), *options.index_head_dim());
  return name_entries(query, entries, scorer->weights_proj(x), *options.top_k(), rotation);
}

void TokenCompressorImpl::reset() {
  const auto& o = options;
  const auto width = *o.head_dim() * (o.top_k() ? 2 : 1);
  kv_proj = register_module("kv_proj", linear(o, o.embed_dim(), width));
  gate_proj = register_module("gate_proj", linear(o, o.embed_dim(), width));
  kv_norm = register_module("kv_norm", norm(o, *o.head_dim()));
  if (o.top_k()) indexer = register_module("indexer", EntryIndexer(o));
  const std::vector<int64_t> sizes{*o.compress_rate(), width};
  register_parameter("position_bias", allocate("compress_rate, head_dim", sizes, position_bias, o.factory()).zero_());
  bind_members();
}

at::Tensor TokenCompressorImpl::forward(const at::Tensor& x) {
  return kv_norm(compress_tokens(kv_proj(x), gate_proj(x), position_bias, options.top_k().has_value()));
}

void CompressedAttentionImpl::reset() {
  auto& o = options;
  check_options(o);
  if (o.top_k())
    o.index_heads(o.index_heads().value_or(o.num_heads())).index_head_dim(o.index_head_dim().value_or(*o.head_dim()));
  const auto width = o.num_heads() * *o.head_dim(), low = *o.q_lora_rank(), out = o.o_groups() * *o.o_lora_rank();
  q_a_proj = register_module("q_a_proj", linear(o, o.embed_dim(), low));
  q_a_norm = register_module("q_a_norm", norm(o, low));
  q_b_proj = register_module("q_b_proj", linear(o, low, width));
  kv_proj = register_module("kv_proj", linear(o, o.embed_dim(), *o.head_dim()));
  kv_norm = register_module("kv_norm", norm(o, *o.head_dim()));
  o_a_proj = register_module("o_a_proj", linear(o, width / o.o_groups(), out));
  o_b_proj = register_module("o_b_proj", linear(o, out, o.embed_dim()));
  if (o.compress_rate()) compressor = register_module("compressor", TokenCompressor(o));
  register_parameter("sinks", allocate("num_heads", {o.num_heads()}, sinks, o.factory()).zero_());
  bind_members();
  rope = register_module("rope", RotaryEmbedding(o.rope()->options));
}

at::Tensor CompressedAttentionImpl::forward(const at::Tensor& x) {
  const auto& o = options;
  check_input("x", x, o.embed_dim(), q_a_proj->weight);
  const auto& angles = rope->settings;
  const auto [cos, sin] = rope_table(at::arange(x.size(1), at::TensorOptions(at::kLong).device(x.device())),
                                     angles.inv_freq, angles.factor);
  const EntryRotation rotation{cos, sin, angles.interleaved, o.compress_rate().value_or(1)};
  const auto low = q_a_norm(q_a_proj(x));
  const auto heads = split_heads(q_b_proj(low), o.num_heads(), *o.head_dim());
  const auto query = rms_norm(heads, at::ones({*o.head_dim()}, heads.options()), o.eps());
  std::optional<at::Tensor> entries, selected;
  if (compressor) {
    entries = compressor->forward(x).unsqueeze(1);
    if (compressor->indexer) {
      const at::NoGradGuard no_grad;
      selected = compressor->indexer->forward(low, x, rotation);
    }
  }
  const auto joined = attend_entries(query, kv_norm(kv_proj(x)).unsqueeze(1), entries, selected, sinks, o.window(),
                                     o.scale(), rotation);
  return o_b_proj(project_groups(joined, o_a_proj->weight, o.o_groups()));
}

void CompressedAttentionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::CompressedAttention", options);
}

}  // namespace attnpack
