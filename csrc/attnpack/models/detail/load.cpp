#include <attnpack/models/detail/load.h>

#include <ATen/ops/empty.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>

namespace attnpack {

void check_load_options(at::ScalarType dtype, at::Device device, const std::optional<int64_t>& max_positions) {
  ATTNPACK_CHECK(at::isFloatingType(dtype) && c10::elementSize(dtype) > 1, "dtype is ", dtype,
                 ", wants a floating one such as at::kFloat");
  if (max_positions) check_size("max_positions", *max_positions);
  ATTNPACK_CHECK(!device.is_meta(), "device: got meta, want one with memory, such as at::kCPU");
  try {
    at::empty({0}, at::TensorOptions().device(device));
  } catch (const c10::Error&) {  // torch's sentence is a page about its builds
    ATTNPACK_CHECK(false, "device: got ", device, ", want one that this torch and this machine have, such as at::kCPU");
  }
}

CausalLM empty_model(CausalLMOptions options, at::ScalarType dtype) {
  Factory factory;
  factory.device = at::kMeta;
  factory.dtype = dtype;
  return CausalLM(options.factory(factory));
}

bool may_be_stored(std::string_view layer, bool is_table) {
  return is_table ? layer == "embed_tokens" : layer != "kv_b_proj" && layer != "o_a_proj";
}

at::Tensor empty_weight(const at::Tensor& parameter, at::ScalarType dtype, at::Device device) {
  return at::empty(parameter.sizes(), at::TensorOptions().dtype(dtype).device(device));
}

}  // namespace attnpack
