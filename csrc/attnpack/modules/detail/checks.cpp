#include <attnpack/modules/detail/checks.h>

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>

#include <cmath>

#include <attnpack/core/check.h>

namespace attnpack {

void check_settings(const std::optional<Window>& window, double softcap, double dropout,
                    const std::optional<double>& scale) {
  const auto [left, right] = window.value_or(Window{-1, -1});
  ATTNPACK_CHECK(left >= -1 && right >= -1, "window: got (", left, ", ", right,
                 "), want how many keys before and behind, -1 for all of them");
  ATTNPACK_CHECK(softcap >= 0 && std::isfinite(softcap), "softcap: got ", softcap,
                 ", want a number above 0, or 0 for none");
  ATTNPACK_CHECK(dropout >= 0 && dropout < 1, "dropout: got ", dropout, ", want 0 <= dropout < 1");
  ATTNPACK_CHECK(!scale || std::isfinite(*scale), "scale: got ", *scale,
                 ", want a finite number, or none for 1 / sqrt(head_dim)");
}

void check_size(const char* name, int64_t size) { ATTNPACK_CHECK(size > 0, name, ": got ", size, ", want at least 1"); }

int64_t resolve_head_dim(int64_t embed_dim, int64_t num_heads, const std::optional<int64_t>& head_dim) {
  check_size("num_heads", num_heads);
  if (head_dim) {
    check_size("head_dim", *head_dim);
    return *head_dim;
  }
  ATTNPACK_CHECK(embed_dim % num_heads == 0, "num_heads: got ", num_heads, ", which does not divide embed_dim ",
                 embed_dim, "; choose a divisor or give head_dim");
  return embed_dim / num_heads;
}

void check_heads(int64_t num_heads, int64_t num_kv_heads, const std::optional<std::vector<int64_t>>& head_map) {
  check_size("num_kv_heads", num_kv_heads);
  if (!head_map) {
    ATTNPACK_CHECK(num_heads % num_kv_heads == 0, "num_kv_heads: got ", num_kv_heads,
                   ", which does not divide num_heads ", num_heads, "; for uneven groups give head_map");
    return;
  }
  ATTNPACK_CHECK(static_cast<int64_t>(head_map->size()) == num_heads, "head_map: got ", head_map->size(),
                 " entries, want one kv head for each of the ", num_heads, " heads");
  for (int64_t kv_head : *head_map) {
    ATTNPACK_CHECK(kv_head >= 0 && kv_head < num_kv_heads, "head_map: got kv head ", kv_head, ", want 0 to ",
                   num_kv_heads - 1);
  }
}

void check_device(const char* name, const at::Tensor& input, const at::Tensor& weight) {
  ATTNPACK_CHECK(input.device() == weight.device(), name, ": got device ", input.device(),
                 ", want the module's device ", weight.device(), "; ",
                 weight.is_meta() ? "its weights hold no numbers yet, assign it a state dict first"
                                  : "move one of them with .to()");
}

namespace {

void check_place(const char* name, const at::Tensor& input, const at::Tensor& weight) {
  if (!weight.defined()) return;
  check_device(name, input, weight);
  // Autocast casts both to its own dtype.
  const auto type = input.device().type();
  ATTNPACK_CHECK(input.scalar_type() == weight.scalar_type() || at::autocast::is_autocast_enabled(type), name,
                 ": got dtype ", input.scalar_type(), ", want the module's dtype ", weight.scalar_type(),
                 "; convert one of them with .to()");
}

}  // namespace

void check_input(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight) {
  ATTNPACK_CHECK(input.dim() == 3 && input.size(2) == width, name, ": got shape ", input.sizes(),
                 ", want [batch, length, ", width, "]");
  check_place(name, input, weight);
}

void check_tokens(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight) {
  ATTNPACK_CHECK(input.dim() > 0 && input.size(-1) == width, name, ": got shape ", input.sizes(), ", want [..., ",
                 width, "]");
  check_place(name, input, weight);
}

void check_inputs(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto same_batch = [&](const char* name, const std::optional<at::Tensor>& other) {
    ATTNPACK_CHECK(!other || other->size(0) == x.size(0), name, ": got batch ", other->size(0), ", want ", x.size(0),
                   " as in x");
  };
  same_batch("context", inputs.context());
  same_batch("value_context", inputs.value_context());
  ATTNPACK_CHECK(!inputs.value_context() || inputs.context(),
                 "value_context: got a tensor without context; give context, where the keys come from, too");
  ATTNPACK_CHECK(!inputs.context() || !inputs.cache(),
                 "cache: got one together with context; a cache holds self-attention's keys, leave it out");
  ATTNPACK_CHECK(!inputs.value_context() || inputs.value_context()->size(1) == inputs.context()->size(1),
                 "value_context: got length ", inputs.value_context()->size(1), ", want ", inputs.context()->size(1),
                 " as context has: each of its keys needs one value");
  check_positions(inputs.positions(), x);
}

void check_positions(const std::optional<at::Tensor>& positions, const at::Tensor& x) {
  if (!positions) return;
  const auto& p = *positions;
  const auto length = x.size(1);
  const bool flat = p.dim() == 1 && p.size(0) == length;
  const bool by_sequence = p.dim() == 2 && (p.size(0) == x.size(0) || p.size(0) == 1) && p.size(1) == length;
  ATTNPACK_CHECK(p.scalar_type() == at::kLong && (flat || by_sequence), "positions has shape ", p.sizes(),
                 " and dtype ", p.scalar_type(), ", wants int64 [length] or [batch, length] with length ", length,
                 ": one number for each new token");
}

void check_lengths(const char* name, const std::optional<at::Tensor>& lengths, const at::Tensor& x, int64_t low) {
  if (!lengths || x.dim() < 2) return;  // such an x is refused where it is read
  ATTNPACK_CHECK(lengths->scalar_type() == at::kLong || lengths->scalar_type() == at::kInt, name, " has dtype ",
                 lengths->scalar_type(), ", wants int32 or int64: call .long() on it, in C++ .to(at::kLong)");
  ATTNPACK_CHECK(lengths->dim() == 1 && lengths->size(0) == x.size(0), name, " has shape ", lengths->sizes(),
                 ", wants [batch] = [", x.size(0), "]: the valid tokens of each sequence");
  if (lengths->is_cpu() && !at::isTensorSubclassLike(*lengths)) check_length_values(name, *lengths, low, x.size(1));
}

void check_length_values(const char* name, const at::Tensor& lengths, int64_t low, int64_t high) {
  const auto read = lengths.to(at::kCPU, at::kLong).contiguous();
  const auto* length = read.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < read.numel(); ++b) {
    ATTNPACK_CHECK(length[b] >= low && length[b] <= high, name, "[", b, "] is ", length[b], ", wants ", low, " to ",
                   high, ": the valid tokens of that row");
  }
}

}  // namespace attnpack
