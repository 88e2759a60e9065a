// SPDX-License-Identifier: Apache-2.0
// The data files that one mount writes in a staging: a pack for small targets, files of their own
// for large tensors. Few are open at a time; older ones are synced early.
#include "fs/save/data_files.h"

#include <chrono>
#include <utility>

namespace tensormount::fs {
namespace {

// If a mount has more files than this, synced files are closed. A checkpoint of thousands of large
// tensors has as many files, and a process may have 1,024 descriptors by default.
constexpr std::size_t kFewFiles = 32;
// Approximate limit of open files: beyond it older ones are synced early and closed.
constexpr std::size_t kManyFiles = 128;
// A pack of this size is followed by a new one.
constexpr std::uint64_t kStagedPackBytes = std::uint64_t{16} << 30;
// Alignment of areas in a pack: the size of the widest element.
constexpr std::uint64_t kPackAlignment = 16;

}  // namespace

DataFile::DataFile(FileSystem& fs, const std::string& staging, std::string name,
                   std::uint32_t number, std::unique_ptr<File> file,
                   std::shared_ptr<std::atomic<std::size_t>> open_files)
    : fs_(fs),
      open_files_(std::move(open_files)),
      folder_(JoinPath(staging, "data")),
      name_(std::move(name)),
      path_(JoinPath(staging, name_)),
      number_(number),
      file_(std::move(file)) {
  ++*open_files_;
}

DataFile::~DataFile() { DropHandle(); }

bool DataFile::TooManyOpen() const { return *open_files_ > kManyFiles; }

void DataFile::DropHandle() {
  if (file_ == nullptr) return;
  file_.reset();
  --*open_files_;
}

// Returns a shared pointer, so that a caller keeps the descriptor if another thread closes the file
// meanwhile.
Result<std::shared_ptr<File>> DataFile::Handle() {
  if (closed_)
    return Status(Code::kStale, path_ + ": its staging directory was published or removed");
  if (file_ == nullptr) {
    // Checked first, because OpenShared would create a missing file, maybe in another staging that
    // has taken this directory's name.
    if (!fs_.Exists(path_))
      return Status(Code::kStale, path_ + ": the file was removed while it was being written");
    TENSORMOUNT_ASSIGN_OR_RETURN(file_, fs_.OpenShared(path_));
    ++*open_files_;
  }
  return file_;
}

Status DataFile::Write(std::uint64_t offset, const void* data, std::size_t size) {
  std::unique_lock lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(failure_);
  const bool was_closed = file_ == nullptr;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, Handle());
  // The write is counted under the lock before it begins, so that CloseIfIdle does not close the
  // file.
  ++started_;
  lock.unlock();
  Status status = file->WriteAt(offset, data, size);
  lock.lock();
  ++done_;
  lock.unlock();
  if (was_closed && TooManyOpen()) {
    (void)Sync();  // A failure condemns the file, as in Create.
    CloseIfIdle();
  }
  return status;
}

Status DataFile::Read(std::uint64_t offset, void* out, std::size_t size) {
  std::unique_lock lock(mutex_);
  const bool was_closed = file_ == nullptr;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, Handle());
  lock.unlock();
  const Status status = file->ReadExactAt(offset, out, size);
  if (was_closed && TooManyOpen()) CloseIfIdle();
  return status;
}

void DataFile::StartWriteback(std::uint64_t offset, std::uint64_t size) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<File> file = file_;
  lock.unlock();
  if (file != nullptr) file->StartWriteback(offset, size);
}

// Group fsync: each caller waits until synced_ reaches the value that done_ had when the call
// began; one caller syncs for all. An fsync covers the writes that had returned when it began
// (`reaches`).
Status DataFile::Sync() {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = done_;
  const auto deadline = std::chrono::steady_clock::now() + kStoragePatience;
  while (failure_.ok() && synced_ < target) {
    if (syncing_) {
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
        return Status(Code::kDeadlineExceeded, path_ + ": timed out waiting for fsync");
      }
      continue;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, Handle());
    syncing_ = true;
    const std::uint64_t reaches = done_;
    const bool name_too = !name_synced_;
    lock.unlock();
    Status status = file->Sync();
    // A new file is durable only with its name, so the first fsync also syncs the directory.
    if (status.ok() && name_too) status = fs_.SyncDirectory(folder_);
    lock.lock();
    syncing_ = false;
    if (status.ok()) {
      synced_ = reaches;
      name_synced_ = true;
    } else {
      // The kernel reports a failed writeback once and may have dropped the pages, so nothing in
      // this file can be trusted.
      failure_ = status.WithContext(name_ + " gets no more data, because its fsync failed");
      condemned_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
  }
  return failure_;
}

void DataFile::CloseIfIdle() {
  const std::lock_guard lock(mutex_);
  if (!syncing_ && started_ == done_ && done_ == synced_) DropHandle();
}

void DataFile::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  DropHandle();
}

DataFiles::DataFiles(FileSystem& fs, const Staging& staging, std::string incarnation)
    : fs_(fs), staging_(staging), incarnation_(std::move(incarnation)) {}

// Double-checked: the first write of a mount makes the journal; later ones see the pointer without
// a lock.
Status DataFiles::Open() {
  if (closed())
    return Status(Code::kStale,
                  ".staging/" + staging_.name + ": the staging directory was published or removed");
  if (journal() != nullptr) return {};
  const std::lock_guard lock(mutex_);
  if (journal_ != nullptr) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(
      journal_,
      JournalWriter::Create(fs_, JoinPath(staging_.directory, "journal/" + incarnation_ + ".tmj"),
                            staging_.uuid, incarnation_));
  journal_ptr_.store(journal_.get(), std::memory_order_release);
  return {};
}

Result<std::shared_ptr<DataFile>> DataFiles::Create(char kind, Placement placement) {
  TENSORMOUNT_RETURN_IF_ERROR(Open());
  std::vector<std::shared_ptr<DataFile>> close;
  std::shared_ptr<DataFile> made;
  {
    const std::lock_guard lock(mutex_);
    JournalRecord record;
    record.kind = JournalRecord::Kind::kFile;
    record.number = static_cast<std::uint32_t>(files_.size());
    record.placement = placement;
    record.file_name = "data/" + staging_.ShortId() + "-" + incarnation_ + "-" + kind +
                       std::to_string(record.number) + ".bin";
    TENSORMOUNT_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        fs_.CreateExclusive(JoinPath(staging_.directory, record.file_name)));
    TENSORMOUNT_RETURN_IF_ERROR(journal_->Append(EncodeRecord(record)));
    made = std::make_shared<DataFile>(fs_, staging_.directory, record.file_name, record.number,
                                      std::move(file), open_files_);
    files_.push_back(made);
    while (next_to_close_ + kManyFiles < files_.size()) close.push_back(files_[next_to_close_++]);
  }
  for (const auto& file : close) {
    // A failure condemns the file, and its writers get the error.
    (void)file->Sync();
    file->CloseIfIdle();
  }
  return made;
}

std::shared_ptr<DataFile> DataFiles::Get(std::uint32_t number) const {
  const std::lock_guard lock(mutex_);
  return files_[number];
}

// The file is made without the lock, because Create takes the lock and syncs other files. Two
// threads may each make a file for one tensor; the second file stays unused.
Result<std::shared_ptr<TensorFile>> DataFiles::FileOfTensor(const std::string& key) {
  {
    const std::lock_guard lock(mutex_);
    const auto at = tensors_.find(key);
    if (at != tensors_.end() && !at->second->file->condemned()) return at->second;
  }
  auto made = std::make_shared<TensorFile>();
  TENSORMOUNT_ASSIGN_OR_RETURN(made->file, Create('t', Placement::kTensorFile));
  const std::lock_guard lock(mutex_);
  std::shared_ptr<TensorFile>& entry = tensors_[key];
  if (entry == nullptr || entry->file->condemned()) entry = std::move(made);
  return entry;
}

// All small targets and objects of this mount share a pack, so that a thousand small tensors need
// one file and one fsync.
Result<DataFiles::Area> DataFiles::Allocate(std::uint64_t bytes) {
  const std::lock_guard lock(pack_mutex_);
  if (pack_ == nullptr || pack_->condemned() || pack_end_ >= kStagedPackBytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(pack_, Create('p', Placement::kPack));
    pack_end_ = 0;
  }
  const std::uint64_t at = (pack_end_ + kPackAlignment - 1) / kPackAlignment * kPackAlignment;
  pack_end_ = at + bytes;
  return Area{pack_, at, bytes};
}

// Only the caller uses `area`, so only the end of the pack needs the lock.
bool DataFiles::Extend(Area& area, std::uint64_t bytes) {
  const std::lock_guard lock(pack_mutex_);
  if (area.file == nullptr || area.file != pack_ || area.end() != pack_end_) return false;
  area.size += bytes;
  pack_end_ += bytes;
  return true;
}

Result<std::uint32_t> DataFiles::AddTarget(const StagedTarget& target, std::uint64_t bytes) {
  TENSORMOUNT_RETURN_IF_ERROR(Open());
  const std::lock_guard lock(mutex_);
  JournalRecord record;
  record.kind = JournalRecord::Kind::kTarget;
  record.number = targets_;
  record.target = target;
  record.end = bytes;
  TENSORMOUNT_RETURN_IF_ERROR(journal_->Append(EncodeRecord(record)));
  return targets_++;
}

void DataFiles::CloseIdle(DataFile& file) {
  if (count() > kFewFiles) file.CloseIfIdle();
}

void DataFiles::CloseForGood() {
  closed_.store(true, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  if (journal_ != nullptr) journal_->Close();
  for (const auto& file : files_) file->Close();
}

std::uint64_t DataFiles::count() const {
  const std::lock_guard lock(mutex_);
  return files_.size();
}

}  // namespace tensormount::fs
