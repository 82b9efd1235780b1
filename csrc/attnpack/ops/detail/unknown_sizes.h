#pragma once

#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>

// Questions about sizes while a graph is traced. A size that depends on data (x[keep]) is not known then, and asking
// for it fails. As in torch, it counts as none of the special ones: it is not 1, not below 1, and equal to itself only.
namespace attnpack {

inline bool same_size(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_FALSE(a.sym_eq(b)); }
inline bool is_one(const c10::SymInt& size) { return same_size(size, 1); }
inline bool is_below_one(const c10::SymInt& size) { return TORCH_GUARD_OR_FALSE(size.sym_lt(1)); }

}  // namespace attnpack
