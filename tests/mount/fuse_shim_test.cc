// SPDX-License-Identifier: Apache-2.0
// The bytes that go to the kernel, over a socket instead of /dev/fuse.
#include "fs/mount/fuse_shim.h"

#include <array>
#include <cstring>
#include <string>
#include <sys/socket.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace tensormount::fs {
namespace {

constexpr std::uint32_t kInitExt = 1u << 30;
constexpr std::uint32_t kWriteback = 1u << 16;
constexpr std::uint32_t kMmap = 1u << 4;
constexpr std::uint32_t kPassthrough = 1u << 5;
// Where fields are in a reply, its header of 16 bytes included.
constexpr std::size_t kFlags = 16 + 12;
constexpr std::size_t kMaxWrite = 16 + 20;
constexpr std::size_t kFlags2 = 16 + 32;
constexpr std::size_t kStackDepth = 16 + 36;
constexpr std::size_t kOpenFlags = 16 + 8;
constexpr std::size_t kBackingId = 16 + 12;

std::uint32_t At(const std::string& bytes, std::size_t offset) {
  std::uint32_t value = 0;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}
void Set(std::string& bytes, std::size_t offset, std::uint32_t value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

class FuseShimTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends_.data()), 0); }
  void TearDown() override {
    for (const int fd : ends_) close(fd);
  }
  // The kernel says INIT with these flags; libfuse replies with its own.
  std::string Init(FuseShim& shim, std::uint32_t flags, std::uint32_t flags2,
                   std::uint32_t reply_flags = 0, std::uint32_t reply_flags2 = 0,
                   std::uint32_t reply_depth = 0) {
    std::string request(40 + 64, '\0');
    Set(request, 4, 26);
    Set(request, 8, 77);
    Set(request, 40, 7);
    Set(request, 44, 41);
    Set(request, 40 + 12, flags);
    Set(request, 40 + 16, flags2);
    EXPECT_EQ(write(ends_[1], request.data(), request.size()),
              static_cast<ssize_t>(request.size()));
    std::string got(200, '\0');
    EXPECT_EQ(shim.Read(ends_[0], got.data(), got.size()), static_cast<ssize_t>(request.size()));
    got.resize(request.size());
    EXPECT_EQ(got, request);
    std::string reply(16 + 64, '\0');
    Set(reply, 0, static_cast<std::uint32_t>(reply.size()));
    Set(reply, 8, 77);
    Set(reply, kFlags, reply_flags);
    Set(reply, kFlags2, reply_flags2);
    Set(reply, kStackDepth, reply_depth);
    Set(reply, kMaxWrite, 1u << 20);
    return Send(shim, reply);
  }
  // In two pieces, as libfuse does.
  std::string Send(FuseShim& shim, std::string reply) {
    iovec pieces[2] = {{reply.data(), 16}, {reply.data() + 16, reply.size() - 16}};
    EXPECT_EQ(shim.Writev(ends_[0], pieces, 2), static_cast<ssize_t>(reply.size()));
    std::string sent(4096, '\0');
    const ssize_t n = read(ends_[1], sent.data(), sent.size());
    sent.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
    return sent;
  }
  static std::string OpenReply(std::int32_t error = 0) {
    std::string reply(16 + 16, '\0');
    Set(reply, 0, static_cast<std::uint32_t>(reply.size()));
    Set(reply, 4, static_cast<std::uint32_t>(error));
    Set(reply, 8, 78);
    Set(reply, 16, 4711);
    Set(reply, kOpenFlags, (1u << 1) | (1u << 5));  // Keep the cache, no flush.
    return reply;
  }

  std::array<int, 2> ends_{};
};

TEST_F(FuseShimTest, RequestsFeaturesOfferedAndWanted) {
  FuseShim shim({.want_mmap = true, .passthrough_depth = 2});
  EXPECT_FALSE(shim.initialized());
  const std::string sent = Init(shim, kInitExt, kMmap | kPassthrough, kWriteback | 8, 1u << 9);
  ASSERT_EQ(sent.size(), 80u);
  EXPECT_EQ(At(sent, kFlags), kInitExt | 8);  // Less the cache for writes, that shuts it out.
  EXPECT_EQ(At(sent, kFlags2), kMmap | kPassthrough | (1u << 9));
  EXPECT_EQ(At(sent, kStackDepth), 2u);
  EXPECT_TRUE(shim.initialized());
  EXPECT_TRUE(shim.passthrough_offered());
  EXPECT_TRUE(shim.passthrough());
  EXPECT_TRUE(shim.direct_io_mmap());
  EXPECT_EQ(shim.kernel_minor(), 41u);
}

TEST_F(FuseShimTest, MessageBeforeInitIsNotTakenForInit) {
  FuseShim shim({.want_mmap = true, .passthrough_depth = 1});
  std::string other(40 + 64, '\0');
  Set(other, 4, 1);
  Set(other, 8, 76);
  ASSERT_EQ(write(ends_[1], other.data(), other.size()), static_cast<ssize_t>(other.size()));
  ASSERT_EQ(shim.Read(ends_[0], other.data(), other.size()), static_cast<ssize_t>(other.size()));
  (void)Init(shim, kInitExt, kMmap | kPassthrough);
  EXPECT_TRUE(shim.initialized());
  EXPECT_TRUE(shim.passthrough());
  EXPECT_TRUE(shim.direct_io_mmap());
}

TEST_F(FuseShimTest, RequestsNoFeatureThatIsNotOffered) {
  for (const std::uint32_t flags : {0u, kInitExt}) {
    FuseShim shim({.want_mmap = true, .passthrough_depth = 1});
    // Without INIT_EXT the second word is not flags at all.
    const std::string sent = Init(shim, flags, flags == 0 ? kMmap | kPassthrough : 0, kWriteback);
    EXPECT_EQ(At(sent, kFlags), kWriteback);
    EXPECT_EQ(At(sent, kFlags2), 0u);
    EXPECT_EQ(At(sent, kStackDepth), 0u);
    EXPECT_FALSE(shim.passthrough_offered());
    EXPECT_FALSE(shim.passthrough());
    EXPECT_FALSE(shim.direct_io_mmap());
  }
}

TEST_F(FuseShimTest, RequestsNoFeatureThatIsNotWanted) {
  FuseShim shim({.want_mmap = false, .passthrough_depth = 0});
  const std::string sent = Init(shim, kInitExt, kMmap | kPassthrough);
  EXPECT_EQ(At(sent, kFlags), 0u);
  EXPECT_EQ(At(sent, kFlags2), 0u);
  EXPECT_TRUE(shim.passthrough_offered());
  EXPECT_FALSE(shim.passthrough());
}

TEST_F(FuseShimTest, LeavesPassthroughToANewerLibfuse) {
  for (const bool agreed : {true, false}) {
    FuseShim shim({.want_mmap = false, .passthrough_depth = 1, .by_libfuse = true});
    const std::uint32_t flags2 = agreed ? kPassthrough : 0;
    const std::string sent = Init(shim, kInitExt, kPassthrough, kInitExt, flags2, agreed ? 1 : 0);
    EXPECT_EQ(At(sent, kFlags2), flags2);
    EXPECT_EQ(shim.passthrough(), agreed);
  }
}

TEST_F(FuseShimTest, AddsTheBackingFileToOneOpenReply) {
  FuseShim shim({.want_mmap = true, .passthrough_depth = 1});
  (void)Init(shim, kInitExt, kPassthrough);
  EXPECT_EQ(Send(shim, OpenReply()), OpenReply());
  {
    const FuseShim::OpenReplyScope names(9, false);
    const std::string sent = Send(shim, OpenReply());
    std::string want = OpenReply();
    Set(want, kOpenFlags, (1u << 7) | (1u << 5));  // Passthrough, and no cache to keep beside it.
    Set(want, kBackingId, 9);
    EXPECT_EQ(sent, want);
    // Errors and replies of another form pass as they are.
    EXPECT_EQ(Send(shim, OpenReply(-5)), OpenReply(-5));
    EXPECT_EQ(Send(shim, OpenReply() + "more"), OpenReply() + "more");
    EXPECT_EQ(Send(shim, OpenReply().substr(0, 24)), OpenReply().substr(0, 24));
  }
  EXPECT_EQ(Send(shim, OpenReply()), OpenReply());
}

}  // namespace
}  // namespace tensormount::fs
