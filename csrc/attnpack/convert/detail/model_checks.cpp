#include <attnpack/convert/detail/model_checks.h>

#include <attnpack/core/check.h>

namespace attnpack::convert {

void refuse_calibration(bool given) {
  ATTNPACK_CHECK(!given, "calibration: got one for a whole model, want it for a single attention layer only");
}

void refuse_shared_norm(bool all_heads) {
  ATTNPACK_CHECK(!all_heads,
                 "qk_norm: got a layer with one norm over all heads, want a norm of each head: a merged head would "
                 "change the norm of the others");
}

void check_layers_found(const std::string& name, const std::string& kind, uint64_t count) {
  ATTNPACK_CHECK(count > 0, name, ": got a module of class ", kind, " without attention layers to convert");
}

}  // namespace attnpack::convert
