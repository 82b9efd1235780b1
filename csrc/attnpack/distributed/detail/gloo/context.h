#pragma once

#include <chrono>

// torch's ProcessGroupGloo.hpp includes headers of gloo, which torch's wheel lacks. This folder has the names that it
// takes from them. group.cpp creates a group and no object of gloo: torch holds those through pointers, so their
// layouts enter no code of ours. A test looks into the object file for any symbol of gloo.
namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
