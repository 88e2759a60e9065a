// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_MOUNT_MOUNT_FIXTURE_H_
#define TENSORMOUNT_TESTS_MOUNT_MOUNT_FIXTURE_H_

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "base/deadline.h"
#include "fs/mount/mount_session.h"
#include "index/store/store.h"
#include "tests/fs/file_ops.h"
#include "tests/support/require.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {

// What `body` returns in a forked child; -1, and a failure, where that does not come back in time.
// Whatever maps files of a mount that this process serves itself belongs there (see MountSession).
inline int ChildStatus(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  const Deadline deadline = Deadline::After(std::chrono::seconds(30));
  int status = 0;
  pid_t ended = 0;
  while (child > 0 && (ended = waitpid(child, &status, WNOHANG)) == 0) {
    if (deadline.Passed()) {
      kill(child, SIGKILL);  // And not waited for: what hangs in the kernel may not even die.
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(ended, child) << "a child that uses the mount did not come back";
  return ended == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Expects it to return true, without failures of gtest's, which the child prints.
inline void ExpectInChild(const std::function<bool()>& body) {
  EXPECT_EQ(ChildStatus([&] { return body() && !testing::Test::HasFailure() ? 0 : 1; }), 0);
}

// A store and an empty folder to mount at; whatever a test leaves mounted goes with it.
class MountTest : public testing::Test {
 protected:
  void SetUp() override {
    TENSORMOUNT_NEEDS_FUSE();
    ASSERT_OK(HostFileSystem().CreateDirectory(mount_point()));
  }
  void TearDown() override {
    session_ = nullptr;
    if (IsMountPoint(mount_point())) {
      (void)Unmount(mount_point(), true, std::chrono::seconds(5));
      ADD_FAILURE() << "the mount was still there";
    }
  }

  std::string store() const { return dir_.Join("store"); }
  std::string mount_point() const { return dir_.Join("mnt"); }
  std::string At(const std::string& path) const { return mount_point() + "/" + path; }

  void Write(const std::string& name, const TinySpec& spec,
             const Store::PublishOptions& options = {}) {
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store(), name, spec, options));
  }
  void Mount(const std::string& source, MountOptions options = {},
             FileSystem& fs = HostFileSystem()) {
    options.source = source;
    options.mount_point = mount_point();
    auto session = MountSession::Start(fs, options);
    ASSERT_OK(session);
    session_ = std::move(session).value();
    ops_ = MakeHostFileOps(mount_point());
  }
  template <typename Condition>
  void ExpectWithin(std::chrono::milliseconds patience, const Condition& condition) {
    const Deadline deadline = Deadline::After(patience);
    while (!condition()) {
      ASSERT_FALSE(deadline.Passed());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  TempDir dir_;
  std::unique_ptr<MountSession> session_;
  std::unique_ptr<FileOps> ops_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_TESTS_MOUNT_MOUNT_FIXTURE_H_
