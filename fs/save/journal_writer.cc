// SPDX-License-Identifier: Apache-2.0
// JournalWriter of journal.h: appends records and makes them durable, several callers with one
// fsync. Apart from journal.cc because the publisher only reads, and a mount only writes.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "fs/save/journal.h"
#include "fs/save/journal_coding.h"

namespace tensormount::fs {
namespace {

// For those who wait for another one's fsync: a disk that hangs so long will not come back.
constexpr std::chrono::minutes kJournalPatience{10};

std::string FolderOf(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

}  // namespace

struct JournalWriter::Impl {
  std::string path;
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<File> file;  // Null once closed. A sync that runs keeps it.
  std::uint64_t end = 0;       // Of what was appended.
  std::uint64_t wanted = 0;    // Of what a sync has to reach: marks need none.
  std::uint64_t synced = 0;
  bool syncing = false;
  Status failure;

  Status Check() const {
    if (!failure.ok()) return failure;
    if (file == nullptr) return Status(Code::kStale, path + ": closed");
    return {};
  }
};

JournalWriter::JournalWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
JournalWriter::~JournalWriter() = default;

Result<std::unique_ptr<JournalWriter>> JournalWriter::Create(FileSystem& fs,
                                                             const std::string& path,
                                                             const Uuid& checkpoint,
                                                             const std::string& incarnation) {
  if (!IsIncarnation(incarnation)) {
    return Status(Code::kInvalidArgument, "'" + incarnation + "' is not 16 hex digits");
  }
  auto impl = std::make_unique<Impl>();
  TENSORMOUNT_ASSIGN_OR_RETURN(impl->file, fs.CreateExclusive(path));
  const std::string head = EncodeHead(checkpoint, incarnation);
  Status status = impl->file->WriteAt(0, head.data(), head.size());
  if (status.ok()) status = impl->file->Sync();
  if (status.ok()) status = fs.SyncDirectory(FolderOf(path));
  if (!status.ok()) {
    (void)fs.RemoveFile(path);  // Else there could be no other try: it must not exist.
    return status;
  }
  impl->path = path;
  impl->end = impl->wanted = impl->synced = head.size();
  return std::unique_ptr<JournalWriter>(new JournalWriter(std::move(impl)));
}

Status JournalWriter::Append(std::string_view records) {
  const std::lock_guard lock(impl_->mutex);
  TENSORMOUNT_RETURN_IF_ERROR(impl_->Check());
  Status status = impl_->file->WriteAt(impl_->end, records.data(), records.size());
  if (!status.ok()) {
    impl_->failure = status;
    return status;
  }
  impl_->end += records.size();
  impl_->wanted = impl_->end;
  return {};
}

Status JournalWriter::Sync() {
  std::unique_lock lock(impl_->mutex);
  const std::uint64_t target = impl_->wanted;
  const auto deadline = std::chrono::steady_clock::now() + kJournalPatience;
  while (impl_->synced < target) {
    TENSORMOUNT_RETURN_IF_ERROR(impl_->Check());
    if (impl_->syncing) {
      if (impl_->changed.wait_until(lock, deadline) == std::cv_status::timeout) {
        return Status(Code::kDeadlineExceeded, impl_->path + ": fsync does not return");
      }
      continue;
    }
    impl_->syncing = true;
    const std::uint64_t reaches = impl_->end;
    const std::shared_ptr<File> file = impl_->file;
    lock.unlock();
    const Status status = file->Sync();
    lock.lock();
    impl_->syncing = false;
    if (status.ok()) {
      impl_->synced = reaches;
      // Not needed by what was promised, and durable some time: where it is, damage before it is
      // told from a torn tail. Where it cannot be written the next record takes its place.
      const std::string mark = EncodeMark(impl_->end, reaches);
      if (impl_->file != nullptr &&
          impl_->file->WriteAt(impl_->end, mark.data(), mark.size()).ok()) {
        impl_->end += mark.size();
      }
    } else if (impl_->failure.ok()) {
      impl_->failure = status;
    }
    impl_->changed.notify_all();
  }
  return impl_->failure;
}

std::uint64_t JournalWriter::synced_bytes() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->synced;
}

void JournalWriter::Close() {
  const std::lock_guard lock(impl_->mutex);
  impl_->file.reset();
}

const std::string& JournalWriter::path() const { return impl_->path; }

}  // namespace tensormount::fs
