#pragma once

namespace attnpack {

// Does nothing: a program that refers to it keeps libattnpack, and with it the operator registrations. A linker would
// otherwise drop libattnpack from programs that look ops up by name, as torch.ops does. <attnpack/attnpack.h> calls it.
void register_ops();

}  // namespace attnpack
