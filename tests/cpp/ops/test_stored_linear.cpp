// Weights of 8 and 4 bits against fp64 from their codes, which are decoded here by hand.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace attnpack {
namespace {

// The numbers of Q8_0 and Q4_0 in fp64: a scale in fp16, then 32 codes of 8 bits; or 16 bytes, whose lower halves are
// the codes of the first 16 numbers, plus 8.
at::Tensor decoded(const at::Tensor& weight) {
  const auto blocks = weight.contiguous();
  const auto out = torch::empty({blocks.size(0), blocks.size(1) * 32}, torch::kDouble);
  const auto size = blocks.size(2);
  const auto* from = blocks.const_data_ptr<uint8_t>();
  auto* to = out.mutable_data_ptr<double>();
  for (int64_t b = 0; b < blocks.size(0) * blocks.size(1); ++b, from += size, to += 32) {
    const double scale = c10::Half(static_cast<uint16_t>(from[0] | from[1] << 8), c10::Half::from_bits());
    for (int i = 0; i < 32; ++i) {
      const int byte = size == 34 ? static_cast<int8_t>(from[2 + i]) : from[2 + i % 16];
      to[i] = scale * (size == 34 ? byte : (i < 16 ? byte & 15 : byte >> 4) - 8);
    }
  }
  return out;
}

at::Tensor largest_of_blocks(const at::Tensor& x) {
  return x.unflatten(-1, {-1, 32}).abs().amax(-1, /*keepdim=*/true).expand({-1, -1, 32}).flatten(1);
}

}  // namespace

TEST_CASE("to_stored: numbers move by half a step, and small ones get the smallest scale") {
  torch::manual_seed(0);
  for (const int64_t bits : {8, 4}) {
    const double codes = bits == 8 ? 127 : 8;
    const auto weight = torch::randn({30, 64}) * torch::logspace(-9, 2, 30).unsqueeze(1);
    const auto blocks = to_stored(weight, bits);
    REQUIRE(blocks.sizes() == at::IntArrayRef{30, 2, bits == 8 ? 34 : 18});
    const auto step = largest_of_blocks(weight.to(torch::kDouble)) / codes + std::ldexp(1, -24);
    // With 4 bits the codes are -8 to 7. The scale is rounded to fp16.
    CHECK(((decoded(blocks) - weight).abs() <= step * (bits == 8 ? 0.57 : 1.07)).all().item<bool>());
    CHECK(decoded(to_stored(torch::zeros({2, 32}), bits)).count_nonzero().item<int64_t>() == 0);
    CHECK(complains("too small for a scale of fp16", [&] { to_stored(torch::full({2, 32}, 1e-8), bits); }));
    CHECK(complains("not finite", [&] { to_stored(torch::full({2, 32}, INFINITY), bits); }));
    CHECK(complains("want a multiple of 32", [&] { to_stored(torch::ones({2, 33}), bits); }));
  }
}

TEST_CASE("stored_linear: fp64 from the codes, rounded by half a step of the input, and in several weights") {
  torch::manual_seed(1);
  for (const int64_t bits : {8, 4}) {
    const auto blocks = to_stored(torch::randn({70, 256}), bits), bias = torch::randn(70);
    const auto weight = decoded(blocks), x = torch::randn({5, 256});
    const auto wide = x.to(torch::kDouble), offset = bias.to(torch::kDouble);
    const auto exact = at::linear(wide, weight, offset);
    CHECK(at::allclose(stored_linear(wide, blocks, offset), exact, 1e-12, 1e-12));
    CHECK(at::allclose(stored_linear(x, blocks, bias, /*round_input=*/false), exact.to(torch::kFloat), 1e-4, 1e-4));
    const auto bound = (0.5001 / 127 * largest_of_blocks(wide)).matmul(weight.abs().t()) + 1e-4;
    const auto found = stored_linear(x, blocks, bias, /*round_input=*/true);
    CHECK(((found - exact).abs() <= bound).all().item<bool>());
    CHECK((found - exact).abs().max().item<double>() > 1e-4);  // it is rounded
    const auto both = stored_linears(x, {blocks, blocks.narrow(0, 3, 40)}, {bias, bias.narrow(0, 3, 40)});
    CHECK(at::equal(both.at(1), both.at(0).narrow(1, 3, 40)));
    CHECK(at::equal(widen_stored(blocks, torch::kDouble), weight));
    const auto ids = torch::tensor({{69, 0}, {3, 3}});
    CHECK(at::equal(stored_rows(blocks, ids, torch::kDouble), weight.index_select(0, ids.flatten()).view({2, 2, 256})));
    CHECK(stored_inputs(blocks) == 256);
    CHECK(complains("input has shape", [&] { stored_linear(x.narrow(1, 0, 32), blocks); }));
    CHECK(complains("has no gradient", [&] { stored_linear(x.clone().requires_grad_(), blocks); }));
  }
}

TEST_CASE("stored weights in the place of numbers freeze a module, and not the tensors that it was given") {
  FeedForward layer(FeedForwardOptions(64, 96).bias(true)), giver(FeedForwardOptions(64, 96).bias(true));
  auto tensors = state_dict(*giver);
  tensors["down_proj.weight"] = to_stored(tensors["down_proj.weight"].detach(), 8);
  tensors.erase("up_proj.bias");
  assign_state_dict(*layer, tensors, /*strict=*/false);
  for (const auto& parameter : layer->parameters()) CHECK(!parameter.requires_grad());
  for (const auto& parameter : giver->parameters()) CHECK(parameter.requires_grad());
  CHECK(layer->gate_proj->weight.data_ptr() == giver->gate_proj->weight.data_ptr());
  CHECK(layer->forward(torch::ones({1, 64})).sizes() == at::IntArrayRef({1, 64}));
}

TEST_CASE("a feed-forward takes stored weights by assign_state_dict") {
  torch::manual_seed(2);
  const torch::NoGradGuard no_grad;
  FeedForward layer(64, 96), twin(64, 96);
  StateDict blocks, numbers;
  for (const auto& [name, tensor] : state_dict(*layer)) {
    blocks[name] = to_stored(tensor, 8);
    numbers[name] = decoded(blocks[name]).to(torch::kFloat);
  }
  CHECK(
      complains("or the same weight in stored blocks, by assign_state_dict", [&] { load_state_dict(*layer, blocks); }));
  assign_state_dict(*layer, blocks);
  load_state_dict(*twin, numbers);
  const auto x = torch::randn({2, 3, 64}), want = twin->forward(x);
  CHECK((layer->forward(x) - want).norm().item<double>() < 0.02 * want.norm().item<double>());
  layer->to(torch::kDouble), twin->to(torch::kDouble);
  const auto wide = x.to(torch::kDouble);
  CHECK(at::allclose(layer->forward(wide), twin->forward(wide), 1e-10, 1e-10));
}

}  // namespace attnpack
