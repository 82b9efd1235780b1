#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace attnpack {

// The speed that this machine reaches with torch's threads and the instruction set in use: the best of several tries.
struct Limits {
  double flops;             // per second: fp32 fused multiply-adds in registers, two operations each
  double bf16_flops;        // the same on pairs of bf16 where the instruction set multiplies them, otherwise flops
  double bytes_per_second;  // read in order from memory: 256 MiB, or twice the last-level caches
};
Limits measure_limits();

// Bytes per second at which torch's threads read fp32 data once, in order.
double read_bytes_per_second(const at::Tensor& data);

// The bytes of this machine's last-level caches (L3) together; 0 where the system does not tell.
int64_t last_level_cache_bytes();

}  // namespace attnpack
