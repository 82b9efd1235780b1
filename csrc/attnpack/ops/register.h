#pragma once

namespace attnpack {

// Does nothing but be called: a program that refers to it keeps libattnpack, and with it the operator registrations,
// which a linker would otherwise drop where only torch.ops-style lookups use them. <attnpack/attnpack.h> calls it.
void register_ops();

}  // namespace attnpack
