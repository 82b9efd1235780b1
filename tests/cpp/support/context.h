#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

// A function on a stack of its own, which goes on where it left. swapcontext would ask the system for the mask of
// signals twice per switch: a third of the time of the tests that switch. So only the first entry is ucontext's.
class Context {
 public:
  // `function` begins at the first switch to this context. It must not return.
  void begin_with(void (*function)(), char* stack, size_t bytes) {
    getcontext(&first_);
    first_.uc_stack.ss_sp = stack;
    first_.uc_stack.ss_size = bytes;
    first_.uc_link = nullptr;
    makecontext(&first_, function, 0);
    has_begun_ = false;
  }
  // Leaves the running function, which is `from`, and returns when somebody switches to it again.
  [[gnu::noinline]] static void go(Context& from, Context& to) {
    if (_setjmp(from.place_) != 0) return;
    if (to.has_begun_) _longjmp(to.place_, 1);
    to.has_begun_ = true;
    setcontext(&to.first_);
  }

 private:
  ucontext_t first_;
  jmp_buf place_;
  bool has_begun_ = true;  // as for the caller's own stack
};
