// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_TEMP_DIR_H_
#define TENSORMOUNT_TESTS_SUPPORT_TEMP_DIR_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace tensormount {

// A fresh folder (mode 0700), removed with everything in it when the object goes; files made
// read-only inside it are no obstacle. Made below TENSORMOUNT_TEST_TMPDIR, else TMPDIR, else /tmp.
// Kept, and its name printed, where TENSORMOUNT_TEST_KEEP is set and the current test failed.
// Does not cross mount points when removing: unmount first. Aborts where the folder cannot be made.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }

  // path() + "/" + name.
  std::string Join(std::string_view name) const;

 private:
  std::string path_;
};

// Whole files by plain system calls, for tests that look behind the code under test. Abort on
// failure.
std::string ReadWholeFile(const std::string& path);
void WriteWholeFile(const std::string& path, std::string_view bytes);
// XORs one byte with 0x40, in place; mode and modification time stay.
void FlipByte(const std::string& path, std::uint64_t offset);

// Removes a tree without following symbolic links or entering other file systems.
void RemoveTree(const std::string& path);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_TEMP_DIR_H_
