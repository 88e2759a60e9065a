// SPDX-License-Identifier: Apache-2.0
// The files that a mount shows of a checkpoint, without a mount (tensormount/c_store.h, over
// fs/views).
#include <memory>
#include <unistd.h>
#include <utility>

#include "fs/views/checkpoint_files.h"
#include "index/public_checkpoint.h"
#include "lib/c_api.h"
#include "lib/c_api_checkpoint.h"

using tensormount::FileKind;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::Handle;
using tensormount::fs::CheckpointFiles;
using tensormount::fs::VirtualFile;

struct tm_files {
  std::unique_ptr<const CheckpointFiles> files;
  const pid_t process = getpid();
};

struct tm_file {
  std::shared_ptr<const VirtualFile> file;
  const pid_t process = getpid();
};

tm_status tm_files_open(const tm_checkpoint* checkpoint, const tm_files_options* options,
                        tm_files** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint"), {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_files_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_files_options"));
    CheckpointFiles::Options how;
    TENSORMOUNT_ASSIGN_OR_RETURN(how.map, tensormount::c_api::ReadNameMap(given.key_map));
    TENSORMOUNT_ASSIGN_OR_RETURN(how.hf.rules, tensormount::c_api::ReadRules(given.hf_rules));
    if (given.hf_part_bytes != 0) how.hf.part_bytes = given.hf_part_bytes;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        auto files,
        CheckpointFiles::Make(tensormount::CheckpointInside::Of(checkpoint->checkpoint), how));
    *out = new tm_files{std::move(files)};
    return {};
  });
}

void tm_files_close(tm_files* files) { tensormount::c_api::FreeHandle(files); }

tm_status tm_files_stat(const tm_files* files, const char* path, tm_file_info* info) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(files, "files"), {path, "path"}, {info, "info"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto attributes, files->files->Stat(path));
    tm_file_info out{};
    out.is_directory = attributes.kind == FileKind::kDirectory ? 1 : 0;
    out.size = attributes.size;
    out.mtime = attributes.mtime;
    out.inode = attributes.inode;
    return tensormount::c_api::WriteStruct(out, info, "tm_file_info");
  });
}

tm_status tm_files_list(const tm_files* files, const char* path, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(files, "files"), {path, "path"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto names, files->files->List(path));
    return tensormount::c_api::SetOutput(std::move(names), out);
  });
}

tm_status tm_file_open(const tm_files* files, const char* path, tm_file** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(files, "files"), {path, "path"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto file, files->files->Open(path));
    *out = new tm_file{std::move(file)};
    return {};
  });
}

void tm_file_close(tm_file* file) { tensormount::c_api::FreeHandle(file); }

uint64_t tm_file_size(const tm_file* file) { return file == nullptr ? 0 : file->file->size(); }

tm_status tm_file_read(const tm_file* file, uint64_t offset, void* out, size_t size, size_t* got) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(file, "file"), {got, "got"}}));
    *got = 0;
    if (size == 0) return {};
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(*got, file->file->Read(offset, out, size, nullptr));
    return {};
  });
}
