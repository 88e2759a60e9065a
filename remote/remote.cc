// SPDX-License-Identifier: Apache-2.0
// Which file system serves which scheme.
#include "remote/remote.h"

#include "base/file_system_for.h"
#include "remote/hub_file_system.h"
#include "remote/remote_file_system.h"
#include "remote/s3_file_system.h"

namespace tensormount {

void AddRemoteFileSystems() {
  static const bool added = [] {
    static auto* http = new HttpFileSystem;  // Never destroyed: threads may use it during exit.
    AddFileSystem("http://", *http);
    AddFileSystem("https://", *http);
    static auto* s3 = new S3FileSystem;
    AddFileSystem("s3://", *s3);
    AddFileSystem("gs://", *s3);
    static auto* hub = new HubFileSystem;
    AddFileSystem("hf://", *hub);
    return true;
  }();
  (void)added;
}

}  // namespace tensormount
