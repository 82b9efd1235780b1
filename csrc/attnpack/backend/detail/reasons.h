#pragma once

namespace attnpack {

// Why a call is passed on. torch refuses some of these calls itself; then its error is the user's.
enum class Reason {
  kNone,
  kLayout,
  kSubclass,
  kTransform,
  kDtype,
  kDevice,
  kSizes,
  kHeads,
  kMask,
  kDropout,
  kScale,
  kChoice,
  kWeights,
  kFaster,
};

// Counts a call for sdpa_report; kNone: the operator took it.
void count_call(Reason reason);

}  // namespace attnpack
