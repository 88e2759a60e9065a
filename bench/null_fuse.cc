// SPDX-License-Identifier: Apache-2.0
#include "bench/null_fuse.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sys/stat.h>
#include <thread>
#include <vector>

#define FUSE_USE_VERSION 312
#include <fuse3/fuse_lowlevel.h>

namespace tensormount::bench {
namespace {

constexpr std::size_t kRequestBytes = 1u << 20;
constexpr double kHour = 3600;
constexpr fuse_ino_t kFile = 2;

struct Answers {
  std::uint64_t file_bytes;
  bool direct_io;
  std::vector<char> bytes;

  struct stat Attributes(fuse_ino_t ino) const {
    struct stat st {};
    st.st_ino = ino;
    st.st_mode = ino == kFile ? S_IFREG | 0444 : S_IFDIR | 0555;
    st.st_nlink = 1;
    st.st_size = ino == kFile ? static_cast<off_t>(file_bytes) : 0;
    return st;
  }
};

Answers& Of(fuse_req_t request) { return *static_cast<Answers*>(fuse_req_userdata(request)); }

void Init(void*, fuse_conn_info* connection) {
  connection->max_write = kRequestBytes;
  connection->max_read = kRequestBytes;
  connection->max_readahead = kRequestBytes;
}

void Lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
  if (parent != FUSE_ROOT_ID || std::strcmp(name, "f") != 0) {
    fuse_reply_err(request, ENOENT);
    return;
  }
  fuse_entry_param entry{};
  entry.ino = kFile;
  entry.attr = Of(request).Attributes(kFile);
  entry.attr_timeout = entry.entry_timeout = kHour;
  fuse_reply_entry(request, &entry);
}

void GetAttr(fuse_req_t request, fuse_ino_t ino, fuse_file_info*) {
  const struct stat st = Of(request).Attributes(ino);
  fuse_reply_attr(request, &st, kHour);
}

void Open(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
  info->direct_io = Of(request).direct_io ? 1 : 0;
  fuse_reply_open(request, info);
}

void Read(fuse_req_t request, fuse_ino_t, std::size_t size, off_t offset, fuse_file_info*) {
  const Answers& answers = Of(request);
  const std::uint64_t at = std::min(static_cast<std::uint64_t>(offset), answers.file_bytes);
  const std::uint64_t left = answers.file_bytes - at;
  const std::uint64_t places = answers.bytes.size() / kRequestBytes;
  fuse_reply_buf(request, answers.bytes.data() + at / kRequestBytes % places * kRequestBytes,
                 static_cast<std::size_t>(std::min<std::uint64_t>({size, left, kRequestBytes})));
}

class Server : public NullFuse {
 public:
  Server(const Options& options)
      : answers_{
            options.file_bytes, options.direct_io,
            std::vector<char>(std::max<std::uint64_t>(options.memory_bytes, kRequestBytes), 'x')} {}

  Status Start(const Options& options) {
    fuse_lowlevel_ops operations{};
    operations.init = Init;
    operations.lookup = Lookup;
    operations.getattr = GetAttr;
    operations.open = Open;
    operations.read = Read;
    // The same mount options as ours: read-only, requests of 1 MiB.
    const char* arguments[] = {"null_fuse", "-o", "ro,fsname=null,max_read=1048576"};
    fuse_args args = FUSE_ARGS_INIT(3, const_cast<char**>(arguments));
    session_ = fuse_session_new(&args, &operations, sizeof(operations), &answers_);
    if (session_ == nullptr) return Status(Code::kUnavailable, "cannot make a FUSE session");
    if (fuse_session_mount(session_, options.mount_point.c_str()) != 0) {
      return Status(Code::kUnavailable, "cannot mount at " + options.mount_point);
    }
    mounted_ = true;
    for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { Serve(); });
    return {};
  }

  ~Server() override {
    if (session_ == nullptr) return;
    fuse_session_exit(session_);
    if (mounted_) fuse_session_unmount(session_);  // Readers of /dev/fuse get ENODEV and end.
    for (std::thread& thread : threads_) thread.join();
    fuse_session_destroy(session_);
  }

 private:
  void Serve() {
    fuse_buf buffer{};
    while (fuse_session_exited(session_) == 0) {
      const int n = fuse_session_receive_buf(session_, &buffer);
      if (n == -EINTR) continue;
      if (n <= 0) break;
      fuse_session_process_buf(session_, &buffer);
    }
    std::free(buffer.mem);
  }

  Answers answers_;
  fuse_session* session_ = nullptr;
  bool mounted_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<NullFuse>> NullFuse::Start(const Options& options) {
  auto server = std::make_unique<Server>(options);
  TENSORMOUNT_RETURN_IF_ERROR(server->Start(options));
  return std::unique_ptr<NullFuse>(std::move(server));
}

}  // namespace tensormount::bench
