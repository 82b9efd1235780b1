#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace attnpack {

// What this machine reaches with torch's threads and the instruction set in use, the best of several tries.
struct Limits {
  double flops;             // fp32 fused multiply-adds in registers, two operations each, a second
  double bf16_flops;        // the same on pairs of bf16 where the instruction set multiplies them, otherwise flops
  double bytes_per_second;  // read in order from memory: 256 MiB, or twice the last-level cache
};
Limits measure_limits();

// Bytes a second at which torch's threads read fp32 data once, in order.
double read_bytes_per_second(const at::Tensor& data);

// Bytes of a last-level cache, of which a machine may have several; 0 where the system does not tell.
int64_t last_level_cache_bytes();

}  // namespace attnpack
