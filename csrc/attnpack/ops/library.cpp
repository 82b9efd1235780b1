#include <attnpack/ops/library.h>

#include <attnpack/version.h>

namespace attnpack {

const char* version() { return ATTNPACK_VERSION; }

}  // namespace attnpack
