// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_PEAK_MEMORY_H_
#define TENSORMOUNT_BENCH_PEAK_MEMORY_H_

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace tensormount {

// Resident memory of this process, as it grew at most since Begin. Needs /proc; 0 without it.
class PeakMemory {
 public:
  void Begin() {
    if (std::FILE* f = std::fopen("/proc/self/clear_refs", "w")) {
      std::fputs("5", f);  // Forget the peak so far.
      std::fclose(f);
    }
    begin_ = Read("VmRSS:");
  }
  double MiB() const { return std::max(0.0, Read("VmHWM:") - begin_) / 1024; }

 private:
  static double Read(const char* name) {
    double kib = 0;
    if (std::FILE* f = std::fopen("/proc/self/status", "r")) {
      char line[256];
      while (std::fgets(line, sizeof(line), f) != nullptr) {
        if (std::strncmp(line, name, std::strlen(name)) == 0) {
          (void)std::sscanf(line + std::strlen(name), "%lf", &kib);
        }
      }
      std::fclose(f);
    }
    return kib;
  }
  double begin_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BENCH_PEAK_MEMORY_H_
