#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

// The barriers of an emulated block that count: arrivals and the bytes of boxes, or threads by number
// (cuda_emulator_sm90.h). Who waits for them, and what they order, is the emulator's.
namespace attnpack::cuda {

class EmulatedBarriers {
 public:
  int32_t add(int arrivals) {
    phases_.push_back({arrivals, arrivals, 0, 0});
    return static_cast<int32_t>(phases_.size()) - 1;
  }
  void arrive(int32_t barrier, int64_t bytes) {
    --phases_.at(barrier).missing;
    expect(phases_.at(barrier), bytes);
  }
  int phase(int32_t barrier) const { return phases_.at(barrier).phase; }

  void add_box(char* to, std::vector<char> bytes, int32_t barrier) {
    boxes_.push_back({to, std::move(bytes), barrier});
  }
  size_t boxes() const { return boxes_.size(); }
  void land(size_t i) {
    const Box box = std::move(boxes_[i]);
    boxes_.erase(boxes_.begin() + static_cast<std::ptrdiff_t>(i));
    std::memcpy(box.to, box.bytes.data(), box.bytes.size());
    expect(phases_.at(box.barrier), -static_cast<int64_t>(box.bytes.size()));
  }
  bool is_under_way(const char* from, int bytes) const {
    for (const Box& box : boxes_)
      if (from < box.to + box.bytes.size() && box.to < from + bytes) return true;
    return false;
  }

  // Returns false if the threads of a barrier name different counts.
  bool arrive_at_number(int number, int threads) {
    Numbered& at = numbered_.at(number);
    if (at.threads && at.threads != threads) return false;
    at.threads = threads;
    if (++at.arrived == threads) at = {0, 0, at.phase + 1};
    return true;
  }
  int phase_of_number(int number) const { return numbered_.at(number).phase; }

 private:
  struct Phases {
    int arrivals, missing;
    int64_t bytes;  // that are expected and have not landed
    int phase;
  };
  struct Numbered {
    int arrived = 0, threads = 0, phase = 0;
  };
  struct Box {
    char* to;
    std::vector<char> bytes;
    int32_t barrier;
  };

  static void expect(Phases& barrier, int64_t bytes) {
    barrier.bytes += bytes;
    if (barrier.missing || barrier.bytes) return;
    barrier.missing = barrier.arrivals;
    ++barrier.phase;
  }

  std::vector<Phases> phases_;
  std::vector<Box> boxes_;
  std::array<Numbered, 16> numbered_;
};

}  // namespace attnpack::cuda
