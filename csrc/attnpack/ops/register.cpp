#include <attnpack/ops/register.h>

namespace attnpack {

void register_ops() {}

}  // namespace attnpack
