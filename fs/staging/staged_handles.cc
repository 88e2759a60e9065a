// SPDX-License-Identifier: Apache-2.0
// Open files below .staging/, with one class for each kind of file. A file that is written counts
// as an open writer from its open to its last flush.
#include "fs/staging/staged_handles.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace tensormount::fs {
namespace {

// Largest size of schema.json and common.json. A schema of a million tensors has about 80 MB.
constexpr std::uint64_t kMaxEditBytes = std::uint64_t{256} << 20;

// Base of all handles: counting as an open writer of the staging (counted_), and error reporting.
// mutex_ is held shared by changes, which run in parallel, and exclusively to begin or end
// counting. So a close waits for running writes, and a write after a close (by another descriptor,
// or through a mapping) begins counting again.
class StagedHandle : public WriteHandle {
 public:
  explicit StagedHandle(HandleContext context) : context_(std::move(context)) {}
  ~StagedHandle() override {
    const std::unique_lock lock(mutex_);
    End();
  }
  // Counts a writable handle as an open writer.
  Status Begin() {
    if (!context_.writable) return {};
    TENSORMOUNT_RETURN_IF_ERROR(context_.staged->BeginWriting());
    counted_ = true;
    return {};
  }

  const std::string& label() const override { return context_.label; }
  Result<Attributes> Stat() override { return context_.stat(); }
  Result<std::uint64_t> Seek(std::uint64_t offset, bool data) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, Stat());
    if (offset >= attributes.size) return Status::FromErrno(ENXIO, "seek in", label());
    return data ? offset : attributes.size;
  }
  Status NoteMapping() override {
    if (!context_.writable) return {};
    {
      const std::shared_lock lock(mutex_);
      if (paged_ && counted_) return {};
    }
    const std::unique_lock lock(mutex_);
    paged_ = true;
    if (counted_) return {};
    // Programs such as np.memmap close the file before they use the first page of the mapping.
    TENSORMOUNT_RETURN_IF_ERROR(LogFailure("map", context_.staged->BeginWriting()));
    counted_ = true;
    Linger();
    return {};
  }
  // Announces the release first (`releasing`), so that a publish that finds this file open waits
  // until its bytes are durable, instead of failing.
  Status Release() override {
    context_.staged->Linger({.closed = 0, .releasing = 1});
    {
      const std::unique_lock lock(mutex_);
      paged_ = false;
      Linger();
    }
    const Status status = Flush();
    context_.staged->Linger({.closed = 0, .releasing = -1});
    return status;
  }
  bool writing() override {
    const std::shared_lock lock(mutex_);
    return counted_;
  }

 protected:
  // Runs `change` as an open writer. Changes of one handle run in parallel.
  template <typename Change>
  Status RunChange(std::string_view what, const Change& change) {
    if (!context_.writable) return Status::FromErrno(EBADF, what, label());
    for (;;) {
      {
        const std::shared_lock lock(mutex_);
        if (counted_) {
          Status status = context_.staged->CheckInPlace();
          if (status.ok()) status = change();
          if (status.ok()) context_.staged->Touch();
          return LogFailure(what, std::move(status));
        }
      }
      const std::unique_lock lock(mutex_);
      if (counted_) continue;
      TENSORMOUNT_RETURN_IF_ERROR(LogFailure(what, context_.staged->BeginWriting()));
      counted_ = true;
    }
  }
  // close(2): runs `settle` exclusively, then stops counting as an open writer, unless a mapping
  // can still write.
  template <typename Settle>
  Status RunClose(const Settle& settle) {
    if (!context_.writable) return {};
    const std::unique_lock lock(mutex_);
    const Status status = settle();
    if (paged_) {
      Linger();
    } else {
      End();
    }
    return LogFailure("close", status);
  }
  Status LogFailure(std::string_view what, Status status) {
    // kStale is not added to .tensormount/errors: a staging that is gone is no failure of the
    // mount.
    if (!status.ok() && status.code() != Code::kStale) {
      context_.stats->Report(what, label(), status);
    }
    return status;
  }
  const HandleContext& context() const { return context_; }

 private:
  // Linger and End require the exclusive lock.
  void Linger() {
    if (counted_ && !std::exchange(lingers_, true)) context_.staged->Linger({.closed = 1});
  }
  void End() {
    if (std::exchange(lingers_, false)) context_.staged->Linger({.closed = -1});
    if (std::exchange(counted_, false)) context_.staged->EndWriting();
  }

  const HandleContext context_;
  std::shared_mutex mutex_;
  // Whether this handle counts in StagedCheckpoint::open_writers. Written under the exclusive lock.
  bool counted_ = false;
  bool paged_ = false;    // Pages were read for a mapping that may still exist.
  bool lingers_ = false;  // This handle still counts after its last close.
};

// A tensor's file or a slice. Writing through a shared mapping would corrupt the tensor: the kernel
// writes back whole pages, whose other bytes are older data or zeros and would count as written. So
// the first such page marks the target as failed (Condemn).
class TargetHandle : public StagedHandle {
 public:
  TargetHandle(HandleContext context, std::shared_ptr<TargetWriter> target)
      : StagedHandle(std::move(context)), target_(std::move(target)) {}

  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) override {
    return target_->Read(offset, out, size);
  }
  Status Write(std::uint64_t offset, const void* data, std::size_t size) override {
    return RunChange("write", [&]() -> Status {
      if (mapped_.load(std::memory_order_relaxed)) return Mapped();
      return target_->Write(offset, data, size);
    });
  }
  // The size is fixed by the schema, so nothing can be appended.
  Result<std::uint64_t> Append(const void*, std::size_t size) override {
    if (size == 0) return target_->size();
    return LogFailure(
        "append to",
        Status::FromErrno(EFBIG, "append to the file of fixed size (see schema.json)", label()));
  }
  Status Truncate(std::uint64_t size) override {
    return RunChange("truncate", [&]() -> Status {
      if (size > target_->size()) {
        return Status::FromErrno(EFBIG, "lengthen the file of fixed size (see schema.json)",
                                 label());
      }
      return size == target_->size() ? Status() : target_->Forget({size, target_->size()});
    });
  }
  Status Flush() override {
    return RunClose([this] { return SyncTarget(); });
  }
  Status Sync() override {
    return context().writable ? LogFailure("fsync", SyncTarget()) : Status();
  }
  Result<std::uint64_t> Seek(std::uint64_t offset, bool data) override {
    const Status none = Status::FromErrno(ENXIO, "seek in", label());
    if (offset >= target_->size()) return none;
    for (const ByteRange& written : target_->WrittenRanges()) {
      if (offset >= written.end) continue;
      if (data) return std::max(written.begin, offset);
      if (offset < written.begin) return offset;
      return written.end;  // Ranges are merged, so a hole begins here.
    }
    if (data) return none;
    return offset;
  }
  Status WritePages(std::uint64_t, const void*, std::size_t) override {
    Status status = Mapped();
    if (mapped_.exchange(true)) return status;
    target_->Condemn(status.message());
    return LogFailure("write", std::move(status));
  }

 private:
  Status Mapped() const {
    return Status::FromErrno(ENODEV,
                             "write through a shared mapping (use write or pwrite: a mapping would "
                             "mark whole pages as written)",
                             label());
  }
  Status SyncTarget() {
    if (mapped_.load()) return Mapped();
    return target_->Sync();
  }

  const std::shared_ptr<TargetWriter> target_;
  std::atomic<bool> mapped_{false};
};

class ObjectHandle : public StagedHandle {
 public:
  ObjectHandle(HandleContext context, std::shared_ptr<BlobWriter> blob)
      : StagedHandle(std::move(context)), blob_(std::move(blob)) {}

  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) override {
    return blob_->Read(offset, out, size);
  }
  Status Write(std::uint64_t offset, const void* data, std::size_t size) override {
    return RunChange("write", [&] { return blob_->Write(offset, data, size); });
  }
  Result<std::uint64_t> Append(const void* data, std::size_t size) override {
    std::uint64_t at = 0;
    TENSORMOUNT_RETURN_IF_ERROR(RunChange("append to", [&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(at, blob_->Append(data, size));
      return {};
    }));
    return at;
  }
  Status Truncate(std::uint64_t size) override {
    return RunChange("truncate", [&] { return blob_->Truncate(size); });
  }
  Status Flush() override {
    return RunClose([this] { return blob_->Sync(); });
  }
  Status Sync() override {
    return context().writable ? LogFailure("fsync", blob_->Sync()) : Status();
  }
  Result<std::uint64_t> Seek(std::uint64_t offset, bool data) override {
    const std::uint64_t size = blob_->size();
    if (offset >= size) return Status::FromErrno(ENXIO, "seek in", label());
    return data ? offset : size;
  }
  // Objects have no unwritten cells, so pages are handled like writes.
  Status WritePages(std::uint64_t offset, const void* data, std::size_t size) override {
    return RunChange("write", [&] { return blob_->Overwrite(offset, data, size); });
  }

 private:
  const std::shared_ptr<BlobWriter> blob_;
};

// The text of schema.json or common.json in memory, applied as a whole by fsync(2) and close(2).
// Each open has its own text, so concurrent edits do not mix; afterwards all edits are merged.
class EditHandle : public StagedHandle {
 public:
  EditHandle(HandleContext context, bool schema, std::string text)
      : StagedHandle(std::move(context)), schema_(schema), text_(std::move(text)) {
    Note();
  }
  ~EditHandle() override { this->context().staged->EndEdit(schema_, this); }

  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) override {
    const std::lock_guard lock(text_mutex_);
    if (offset >= text_.size()) return std::size_t{0};
    const std::size_t n = std::min<std::uint64_t>(size, text_.size() - offset);
    std::memcpy(out, text_.data() + offset, n);
    return n;
  }
  Status Write(std::uint64_t offset, const void* data, std::size_t size) override {
    return RunChange("write", [&]() -> Status {
      const std::lock_guard lock(text_mutex_);
      return Put(offset, data, size);
    });
  }
  Result<std::uint64_t> Append(const void* data, std::size_t size) override {
    std::uint64_t at = 0;
    TENSORMOUNT_RETURN_IF_ERROR(RunChange("append to", [&]() -> Status {
      const std::lock_guard lock(text_mutex_);
      at = text_.size();
      return Put(at, data, size);
    }));
    return at;
  }
  Status Truncate(std::uint64_t size) override {
    return RunChange("truncate", [&]() -> Status {
      const std::lock_guard lock(text_mutex_);
      if (size > kMaxEditBytes) return Status::FromErrno(EFBIG, "lengthen", label());
      // Editors truncate a file before they write it. An empty text is not applied, because it is
      // no valid schema and close(2) would fail.
      changed_ = size > 0 && (changed_ || size != text_.size());
      text_.resize(size);
      Note();
      return {};
    });
  }
  Status WritePages(std::uint64_t offset, const void* data, std::size_t size) override {
    return RunChange("write", [&]() -> Status {
      const std::lock_guard lock(text_mutex_);
      if (offset >= text_.size()) return {};
      return Put(offset, data, std::min<std::uint64_t>(size, text_.size() - offset));
    });
  }
  Status Flush() override {
    return RunClose([this] { return Take(); });
  }
  Status Sync() override {
    return RunChange("fsync", [this] { return Take(); });
  }

 private:
  Status Put(std::uint64_t offset, const void* data, std::size_t size) {
    if (offset > kMaxEditBytes || size > kMaxEditBytes - offset) {
      return Status::FromErrno(EFBIG, "write", label());
    }
    text_.resize(std::max<std::size_t>(text_.size(), offset + size));
    std::memcpy(text_.data() + offset, data, size);
    changed_ = changed_ || size > 0;
    Note();
    return {};
  }
  void Note() { context().staged->NoteEdit(schema_, this, text_.size()); }
  Status Take() {
    const std::lock_guard lock(text_mutex_);
    if (!changed_) return {};
    StagedCheckpoint& of = *context().staged;
    if (schema_) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const StagingSchema edit, StagingSchema::Parse(text_));
      TENSORMOUNT_RETURN_IF_ERROR(of.ExtendSchema(edit));
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(of.CheckInPlace(true));
      TENSORMOUNT_RETURN_IF_ERROR(WriteCommonJson(of.fs(), of.staging(), of.incarnation(), text_));
    }
    changed_ = false;
    return {};
  }

  const bool schema_;
  std::mutex text_mutex_;
  std::string text_;
  bool changed_ = false;
};

// Opening the file for writing made the mark (StagingTree::OpenNode), so both `touch` and
// `echo > done/3` work.
class MarkHandle : public StagedHandle {
 public:
  using StagedHandle::StagedHandle;
  Result<std::size_t> Read(std::uint64_t, void*, std::size_t) override { return std::size_t{0}; }
  Status Write(std::uint64_t, const void*, std::size_t) override { return {}; }
  Result<std::uint64_t> Append(const void*, std::size_t) override { return std::uint64_t{0}; }
  Status Truncate(std::uint64_t) override { return {}; }
  Status WritePages(std::uint64_t, const void*, std::size_t) override { return {}; }
  Status Flush() override { return {}; }
  Status Sync() override { return {}; }
};

class TextHandle : public StagedHandle {
 public:
  TextHandle(HandleContext context, std::string text)
      : StagedHandle(std::move(context)), text_(std::move(text)) {}
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) override {
    if (offset >= text_.size()) return std::size_t{0};
    const std::size_t n = std::min<std::uint64_t>(size, text_.size() - offset);
    std::memcpy(out, text_.data() + offset, n);
    return n;
  }
  Status Write(std::uint64_t, const void*, std::size_t) override { return ReadOnly(); }
  Result<std::uint64_t> Append(const void*, std::size_t) override { return ReadOnly(); }
  Status Truncate(std::uint64_t) override { return ReadOnly(); }
  Status WritePages(std::uint64_t, const void*, std::size_t) override { return ReadOnly(); }
  Status Flush() override { return {}; }
  Status Sync() override { return {}; }

 private:
  Status ReadOnly() const { return Status::FromErrno(EBADF, "write", label()); }
  const std::string text_;
};

template <typename H, typename... Args>
Result<std::shared_ptr<WriteHandle>> OpenForWriting(Args&&... args) {
  auto handle = std::make_shared<H>(std::forward<Args>(args)...);
  TENSORMOUNT_RETURN_IF_ERROR(handle->Begin());
  return std::shared_ptr<WriteHandle>(std::move(handle));
}

}  // namespace

Result<std::shared_ptr<WriteHandle>> OpenTargetHandle(HandleContext context,
                                                      std::shared_ptr<TargetWriter> target) {
  return OpenForWriting<TargetHandle>(std::move(context), std::move(target));
}

Result<std::shared_ptr<WriteHandle>> OpenObjectHandle(HandleContext context,
                                                      std::shared_ptr<BlobWriter> blob) {
  return OpenForWriting<ObjectHandle>(std::move(context), std::move(blob));
}

Result<std::shared_ptr<WriteHandle>> OpenEditHandle(HandleContext context, bool schema,
                                                    std::string text) {
  return OpenForWriting<EditHandle>(std::move(context), schema, std::move(text));
}

std::shared_ptr<WriteHandle> OpenMarkHandle(HandleContext context) {
  return std::make_shared<MarkHandle>(std::move(context));
}

std::shared_ptr<WriteHandle> OpenTextHandle(HandleContext context, std::string text) {
  return std::make_shared<TextHandle>(std::move(context), std::move(text));
}

}  // namespace tensormount::fs
