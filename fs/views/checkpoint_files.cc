// SPDX-License-Identifier: Apache-2.0
// Looks up a path in a checkpoint's tree name by name, as the kernel would, and then releases the
// references to items of slices/.
#include "fs/views/checkpoint_files.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "fs/answers.h"

namespace tensormount::fs {
namespace {

// Releases the references that lookups below slices/ took, as the kernel does when it forgets
// nodes.
class SliceReferences {
 public:
  explicit SliceReferences(SliceItems& items) : items_(items) {}
  SliceReferences(const SliceReferences&) = delete;
  SliceReferences& operator=(const SliceReferences&) = delete;
  ~SliceReferences() {
    for (const std::uint64_t item : held_) items_.Forget(item, 1);
  }
  void Add(const Node& node) {
    if (node.view == CheckpointView::kSlicesView && node.item != View::kRoot) {
      held_.push_back(node.item);
    }
  }

 private:
  SliceItems& items_;
  std::vector<std::uint64_t> held_;
};

}  // namespace

Result<std::unique_ptr<const CheckpointFiles>> CheckpointFiles::Make(
    std::shared_ptr<const OpenedCheckpoint> opened, const Options& options) {
  std::unique_ptr<CheckpointFiles> files(new CheckpointFiles(std::make_shared<SliceItems>()));
  CheckpointView::Options shown;
  shown.list_views = true;
  shown.map = options.map;
  shown.hf = options.hf;
  shown.slices = files->slices_;
  TENSORMOUNT_ASSIGN_OR_RETURN(files->view_,
                               CheckpointView::FromOpened(std::move(opened), Ownership(), shown));
  return std::unique_ptr<const CheckpointFiles>(std::move(files));
}

template <typename Use>
auto CheckpointFiles::At(std::string_view path, const Use& use) const -> decltype(use(Child{})) {
  SliceReferences references(*slices_);
  Child at{.name = {}, .node = {.slot = 0, .view = kOwnView, .item = kRootItem}, .attributes = {}};
  TENSORMOUNT_ASSIGN_OR_RETURN(at.attributes, view_->Stat(at.node));
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t slash = std::min(path.find('/', begin), path.size());
    const std::string_view name = path.substr(begin, slash - begin);
    begin = slash + 1;
    if (name.empty() && begin > path.size()) break;  // A slash at the end.
    if (at.attributes.kind != FileKind::kDirectory) {
      return Status::FromErrno(ENOTDIR, "look up", path);
    }
    Result<Child> child = view_->Lookup(at.node, name);
    if (child.status().code() == Code::kNotFound) {
      return Status(Code::kNotFound, std::string(path) + ": no such file in the checkpoint");
    }
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    at = std::move(child).value();
    references.Add(at.node);
  }
  return use(at);
}

Result<Attributes> CheckpointFiles::Stat(std::string_view path) const {
  return At(path, [](const Child& at) -> Result<Attributes> { return at.attributes; });
}

Result<std::vector<std::string>> CheckpointFiles::List(std::string_view path) const {
  return At(path, [&](const Child& at) -> Result<std::vector<std::string>> {
    if (at.attributes.kind != FileKind::kDirectory) {
      return Status(Code::kInvalidArgument, std::string(path) + ": not a directory");
    }
    std::vector<std::string> names;
    TENSORMOUNT_RETURN_IF_ERROR(view_->List(at.node, 0, [&](const Child& child, std::uint64_t) {
      names.push_back(child.name);
      return true;
    }));
    return names;
  });
}

Result<std::shared_ptr<const VirtualFile>> CheckpointFiles::Open(std::string_view path) const {
  return At(path, [&](const Child& at) -> Result<std::shared_ptr<const VirtualFile>> {
    if (at.attributes.kind == FileKind::kDirectory) return Status::FromErrno(EISDIR, "open", path);
    return view_->OpenFile(at.node);
  });
}

}  // namespace tensormount::fs
