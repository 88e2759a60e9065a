// SPDX-License-Identifier: Apache-2.0
// Tells the processes that write to an open file apart by their descriptor tables (file_users.h).
#include "fs/mount/file_users.h"

#include <algorithm>
#include <string>
#include <unistd.h>

#include "fs/mount/callers.h"

namespace tensormount::fs {
namespace {

bool IsThreadOf(pid_t process, pid_t thread) {
  if (process == thread) return true;
  const std::string path = "/proc/" + std::to_string(process) + "/task/" + std::to_string(thread);
  return access(path.c_str(), F_OK) == 0;
}

}  // namespace

// The thread waits for the answer to its open, so /proc still lists it.
FileUsers::FileUsers(pid_t thread) : opener_(ProcessOf(thread)) {}

bool FileUsers::IsOpener(std::uint64_t table, pid_t thread) const {
  if (opener_table_ != 0 && table == opener_table_) return true;
  // In another PID namespace the opener is not visible: the first table that writes counts as the
  // opener's, and until then every caller as the opener.
  if (opener_ == 0 || thread <= 0) return opener_table_ == 0;
  return IsThreadOf(opener_, thread);
}

// The search is short: a file usually has one writing process.
void FileUsers::NoteWrite(std::uint64_t table, pid_t thread) {
  const std::lock_guard lock(mutex_);
  if (std::find(writers_.begin(), writers_.end(), table) != writers_.end()) return;
  writers_.push_back(table);
  if (opener_table_ == 0 && IsOpener(table, thread)) opener_table_ = table;
}

FileUsers::Close FileUsers::NoteClose(std::uint64_t table, pid_t thread) {
  const std::lock_guard lock(mutex_);
  const bool wrote = std::erase(writers_, table) > 0;
  const bool opened = IsOpener(table, thread);
  if (!wrote && !opened) return Close::kUnrelated;
  if (opened) opener_has_it_ = false;
  return opener_has_it_ || !writers_.empty() ? Close::kNotLast : Close::kLast;
}

}  // namespace tensormount::fs
