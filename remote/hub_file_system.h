// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_HUB_FILE_SYSTEM_H_
#define TENSORMOUNT_REMOTE_HUB_FILE_SYSTEM_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "remote/remote_file_system.h"

namespace tensormount {

// hf://ORG/MODEL[@REVISION][/FILE]: models of the Hugging Face hub, or of HF_ENDPOINT. A revision
// is a branch, a tag or a commit ("main" if there is none; a "/" in it is written %2F), and is
// resolved to a commit once in each process: all files are those of this commit. The token is
// HF_TOKEN, or that of `hf auth login`.
class HubFileSystem : public RemoteFileSystem {
 public:
 protected:
  Result<RemoteObject> ObjectAt(const std::string& path) override;
  Result<std::optional<Entries>> EntriesOf(const std::string& path) override;
  Status FailureOf(const std::string& path, const HttpResponse& response) override;
  std::string RootOf(const std::string& path) const override;

 private:
  struct Location {
    std::string model;  // "ORG/MODEL"
    std::string revision;
    std::string file;  // Empty: the model itself.
  };
  // A model at one commit.
  struct Commit {
    std::string hash;
    std::vector<std::string> files;
  };
  static Result<Location> LocationOf(const std::string& path);
  Result<std::shared_ptr<const Commit>> CommitOf(const std::string& path, const Location& at);

  struct Commits {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<const Commit>> by_name;  // "ORG/MODEL@REVISION"
  };
  PerProcessMember<Commits> commits_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_HUB_FILE_SYSTEM_H_
