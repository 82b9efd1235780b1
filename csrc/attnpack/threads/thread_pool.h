#pragma once

#include <cstdint>

// Threads that help with loops. No headers of torch.
//
// OpenMP's loops end when every thread of the team has run. Beside another process a thread waits for a core for a time
// slice, some milliseconds, and so does the whole loop. Here the caller works from the start, and closes its loop when
// no work is left: it waits for threads that are in the middle of some work, never for one that has not come.
namespace attnpack {

// Calls task(context) on this thread, and on up to `helpers` others as they come. Returns when no call is running. The
// task hands out its work itself, so that each call takes what no other has taken. The first exception of a call is
// thrown here. Inside of a task this is a plain call, and so it is while too many loops run at the same time.
// libattnpack_kernels.so has these threads for both libraries.
[[gnu::visibility("default")]] void run_with_helpers(int64_t helpers, void (*task)(void*), void* context);

template <class Task>
void run_with_helpers(int64_t helpers, const Task& task) {
  run_with_helpers(helpers, [](void* context) { (*static_cast<const Task*>(context))(); }, const_cast<Task*>(&task));
}

}  // namespace attnpack
