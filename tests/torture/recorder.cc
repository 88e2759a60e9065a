// SPDX-License-Identifier: Apache-2.0
// A disk that remembers: MNT/disk has the bytes of IMAGE (a file in memory: tmpfs, sparse), and
// each write and each flush of it is appended to LOG in the order in which they were answered. What
// is written to MNT/mark goes into LOG as it is, in its place among them. tests/torture/crash.py
// puts a loop device on the disk, which turns the cache flushes of a filesystem into FSYNC here.
//
// usage: recorder MNT IMAGE LOG          stays until MNT is unmounted
//
// A record of LOG: kind (8 bytes: 'W' write, 'F' flush, 'M' mark), offset (8), length (8), bytes.
// One thread serves, so that a write that precedes a flush in LOG was answered before it.
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

#define FUSE_USE_VERSION 312
#include <fuse3/fuse_lowlevel.h>

namespace {

constexpr std::size_t kRequestBytes = 1u << 20;
constexpr double kHour = 3600;
constexpr fuse_ino_t kDisk = 2;
constexpr fuse_ino_t kMark = 3;

int image = -1;
int record_log = -1;
std::vector<char> buffer(kRequestBytes);

struct Record {
  std::uint64_t kind;
  std::uint64_t offset;
  std::uint64_t length;
};

// 0 or an errno: a log with a hole would prove nothing.
int Append(char kind, std::uint64_t offset, const char* data, std::size_t length) {
  Record record{static_cast<std::uint64_t>(kind), offset, length};
  const iovec parts[] = {{&record, sizeof(record)}, {const_cast<char*>(data), length}};
  const ssize_t written = ::writev(record_log, parts, length == 0 ? 1 : 2);
  return written == static_cast<ssize_t>(sizeof(record) + length) ? 0 : EIO;
}

struct stat Attributes(fuse_ino_t ino) {
  struct stat st {};
  if (ino == kDisk) ::fstat(image, &st);
  st.st_ino = ino;
  st.st_mode = ino == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0600;
  st.st_nlink = 1;
  return st;
}

void Init(void*, fuse_conn_info* connection) {
  connection->max_write = kRequestBytes;
  connection->max_readahead = kRequestBytes;
}

void Lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
  fuse_entry_param entry{};
  if (parent == FUSE_ROOT_ID && std::strcmp(name, "disk") == 0) entry.ino = kDisk;
  if (parent == FUSE_ROOT_ID && std::strcmp(name, "mark") == 0) entry.ino = kMark;
  if (entry.ino == 0) {
    fuse_reply_err(request, ENOENT);
    return;
  }
  entry.attr = Attributes(entry.ino);
  entry.attr_timeout = entry.entry_timeout = kHour;
  fuse_reply_entry(request, &entry);
}

void GetAttr(fuse_req_t request, fuse_ino_t ino, fuse_file_info*) {
  const struct stat st = Attributes(ino);
  fuse_reply_attr(request, &st, kHour);
}

// O_TRUNC on `mark`; nobody changes the disk's size.
void SetAttr(fuse_req_t request, fuse_ino_t ino, struct stat*, int, fuse_file_info* file) {
  GetAttr(request, ino, file);
}

void Open(fuse_req_t request, fuse_ino_t ino, fuse_file_info* file) {
  file->direct_io = ino == kMark;
  fuse_reply_open(request, file);
}

void Read(fuse_req_t request, fuse_ino_t ino, std::size_t size, off_t offset, fuse_file_info*) {
  if (size > buffer.size()) buffer.resize(size);
  const ssize_t got = ino == kDisk ? ::pread(image, buffer.data(), size, offset) : 0;
  if (got < 0) {
    fuse_reply_err(request, errno);
    return;
  }
  fuse_reply_buf(request, buffer.data(), static_cast<std::size_t>(got));
}

void Write(fuse_req_t request, fuse_ino_t ino, const char* data, std::size_t size, off_t offset,
           fuse_file_info*) {
  if (ino == kDisk && ::pwrite(image, data, size, offset) != static_cast<ssize_t>(size)) {
    fuse_reply_err(request, ENOSPC);
    return;
  }
  if (const int error =
          Append(ino == kDisk ? 'W' : 'M', static_cast<std::uint64_t>(offset), data, size)) {
    fuse_reply_err(request, error);
    return;
  }
  fuse_reply_write(request, size);
}

void Sync(fuse_req_t request, fuse_ino_t ino, int, fuse_file_info*) {
  fuse_reply_err(request, ino == kDisk ? Append('F', 0, nullptr, 0) : 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: recorder MNT IMAGE LOG\n");
    return 2;
  }
  image = ::open(argv[2], O_RDWR | O_CLOEXEC);
  record_log = ::open(argv[3], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (image < 0 || record_log < 0) {
    std::perror("recorder");
    return 2;
  }
  fuse_lowlevel_ops operations{};
  operations.init = Init;
  operations.lookup = Lookup;
  operations.getattr = GetAttr;
  operations.setattr = SetAttr;
  operations.open = Open;
  operations.read = Read;
  operations.write = Write;
  operations.fsync = Sync;
  std::string name = "recorder";
  std::string option = "-ofsname=recorder,allow_other";
  char* arguments[] = {name.data(), option.data(), nullptr};
  fuse_args args = FUSE_ARGS_INIT(2, arguments);
  fuse_session* session = fuse_session_new(&args, &operations, sizeof(operations), nullptr);
  if (session == nullptr || fuse_set_signal_handlers(session) != 0 ||
      fuse_session_mount(session, argv[1]) != 0)
    return 2;
  const int ended = fuse_session_loop(session);
  fuse_session_unmount(session);
  fuse_session_destroy(session);
  return ended == 0 ? 0 : 1;
}
