// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_FILE_SYSTEM_FOR_H_
#define TENSORMOUNT_BASE_FILE_SYSTEM_FOR_H_

#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"

namespace tensormount {

// The file system for a path from the user: a source, a store, a destination, a file of rules. Only
// this function interprets the form of the path; all other code gets a FileSystem from here or from
// its caller. The complete text, with its scheme, is the path on that file system, so that messages
// show what the user typed, and other ranks or the mount's daemon find the same file system.
//
// A text without a scheme is a path on the host, as is "./s3:/bucket". kUnsupported for
//   - a URL of an unknown scheme ("s3://bucket/x") and a path as scp takes it ("user@host:x",
//     "host:/x"): as a path on the host it would name a directory "s3:" by mistake;
//   - "~" and "~/x", which only a shell expands.
// The result depends only on the text, so that all ranks of a job agree. No storage is accessed:
// whether the path exists is known only from later calls.
Result<FileSystem*> FileSystemFor(std::string_view text);

// `text` without the query of a URL, which may be a credential (a presigned URL): for messages and
// the table of mounts.
std::string WithoutQuery(std::string_view text);

// Registers `fs` for texts that begin with `scheme` ("https://"). `fs` must live as long as the
// process. Call this function before anything is opened. Thread-safe.
void AddFileSystem(std::string_view scheme, FileSystem& fs);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_FILE_SYSTEM_FOR_H_
