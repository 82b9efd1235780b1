#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/safe_numerics.h>

#include <attnpack/core/check.h>

#include <limits>
#include <string>

namespace attnpack {

// Raises unless the bytes of a tensor of these sizes are an int64. `names` says where the sizes come from.
inline void check_storable(const std::string& names, c10::IntArrayRef sizes, size_t element_bytes) {
  uint64_t bytes = 0;
  bool overflows = c10::safe_multiplies_u64(sizes, &bytes);
  overflows |= c10::mul_overflows(bytes, static_cast<uint64_t>(element_bytes), &bytes);
  ATTNPACK_CHECK(!overflows && bytes <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), names,
                 " make a tensor ", sizes, " of ", element_bytes, " bytes each, which is more than 2^63 bytes; want ",
                 "smaller sizes");
}

}  // namespace attnpack
