// SPDX-License-Identifier: Apache-2.0
// Signals set a flag (interrupt.h). SA_RESETHAND restores a signal's default action when the signal
// arrives, so the same signal a second time ends the process.
#include "mount-tools/interrupt.h"

#include <iterator>

namespace tensormount::tools {
namespace {

std::atomic<bool> asked = false;
std::atomic<int> asked_by = 0;
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void OnSignal(int signal) {
  asked_by.store(signal);
  asked.store(true);
}

}  // namespace

Interrupt::Interrupt() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler == SIG_IGN) continue;
    struct sigaction action {};
    action.sa_handler = OnSignal;
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    sigemptyset(&action.sa_mask);
    sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], &before_[i], nullptr);
  }
}

const std::atomic<bool>* Interrupt::flag() const { return &asked; }

Status Interrupt::Check() const {
  return asked ? Status(Code::kCancelled, "interrupted") : Status();
}

int Interrupt::ExitStatus(const Status& failure, int status) const {
  return asked && failure.code() == Code::kCancelled ? 128 + asked_by : status;
}

}  // namespace tensormount::tools
