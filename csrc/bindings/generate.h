#pragma once

#include <attnpack/models/generate.h>
#include <bindings/arguments.h>

#include <functional>

namespace attnpack {

// The names of generate's arguments: `first`, and those of the loop.
Names names_of_generate(Names first);

// Reads the loop's options, the last arguments that are left, and calls `run` with them and without the GIL.
at::Tensor run_generate(Arguments& arguments, const std::function<at::Tensor(const GenerateOptions&)>& run);

}  // namespace attnpack
