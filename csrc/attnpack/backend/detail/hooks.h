#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

// The Python package sets these hooks of the replacements. A C++ program without Python sets none.
namespace attnpack {

// After the first enable of a function (true) and after its last disable (false).
using ChangeHook = std::function<void(bool enabled)>;
void set_sdpa_hook(ChangeHook changed);
void set_linear_hook(ChangeHook changed);

// Whether the operators may take tensors of these classes, which are not plain: those of a tracer, for one. Undefined
// tensors are none.
using TakesHook = std::function<bool(at::TensorList tensors)>;
void set_takes_hook(TakesHook takes);

// Whether all tensors are plain, or the hook welcomes them.
bool takes_classes_of(at::TensorList tensors);

}  // namespace attnpack
