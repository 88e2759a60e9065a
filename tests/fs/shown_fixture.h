// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_FS_SHOWN_FIXTURE_H_
#define TENSORMOUNT_TESTS_FS_SHOWN_FIXTURE_H_

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "fs/views/shown_checkpoint.h"
#include "fs/views/view.h"
#include "shard/tensor_meta.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount::fs {

// A tiny checkpoint on disk with all that views are made from; no Vfs.
class ShownFixture {
 public:
  explicit ShownFixture(const TinySpec& spec) : spec_(spec) {
    const Status made = Make();
    if (!made.ok()) ADD_FAILURE() << made.message();
  }
  const TinySpec& spec() const { return spec_; }
  const ShownCheckpoint& shown() const { return *shown_; }

 private:
  Status Make() {
    TENSORMOUNT_RETURN_IF_ERROR(
        WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), "step-1", spec_).status());
    TENSORMOUNT_ASSIGN_OR_RETURN(
        opened_, OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("store/step-1"), {}));
    const CheckpointIndex& index = opened_->index();
    tensors_ = std::make_unique<const ShownTensors>(index);
    tree_ = std::make_unique<KeyTree>(*tensors_);
    TENSORMOUNT_ASSIGN_OR_RETURN(layers_, LayerFiles::Make(index));
    TENSORMOUNT_ASSIGN_OR_RETURN(objects_, ShownObjects::Make(index));
    shown_ = std::make_unique<ShownCheckpoint>(
        ShownCheckpoint{*opened_, *tensors_, *tree_, *layers_, *objects_});
    return {};
  }

  TempDir dir_;
  TinySpec spec_;
  std::shared_ptr<OpenedCheckpoint> opened_;
  std::unique_ptr<const ShownTensors> tensors_;
  std::unique_ptr<const KeyTree> tree_;
  std::unique_ptr<const LayerFiles> layers_;
  std::unique_ptr<const ShownObjects> objects_;
  std::unique_ptr<const ShownCheckpoint> shown_;
};

// The row-major bytes of a box out of those of its tensor, element by element, in a container whose
// rest is zeros.
inline std::string CutBox(const std::string& bytes, std::size_t item, const Dims& shape,
                          const Box& box, const Dims& container) {
  std::size_t cells = 1;
  for (const std::int64_t extent : container) cells *= static_cast<std::size_t>(extent);
  std::string out(cells * item, '\0');
  if (box.empty()) return out;
  Dims at = Dims::Filled(shape.rank(), 0);  // Within the box.
  for (;;) {
    std::int64_t from = 0;
    std::int64_t to = 0;
    for (int a = 0; a < shape.rank(); ++a) {
      from = from * shape[a] + box.begin(a) + at[a];
      to = to * container[a] + at[a];
    }
    out.replace(static_cast<std::size_t>(to) * item, item,
                bytes.substr(static_cast<std::size_t>(from) * item, item));
    int a = shape.rank() - 1;
    while (a >= 0 && ++at[a] == box.extent(a)) at[a--] = 0;
    if (a < 0) return out;
  }
}

// What a file holds, its segments read one by one.
inline Result<std::string> ReadInventory(const ShownCheckpoint& shown,
                                         const FileSegments& segments) {
  using Kind = FileSegments::Segment::Kind;
  std::string out;
  for (const FileSegments::Segment& s : segments.segments()) {
    EXPECT_EQ(s.begin, out.size());
    std::string bytes(s.length, '\0');
    switch (s.kind) {
      case Kind::kLiteral:
        bytes = segments.literal(s.ordinal).substr(s.skip, s.length);
        break;
      case Kind::kText:
        TENSORMOUNT_RETURN_IF_ERROR(segments.text().Read(s.skip, bytes.data(), bytes.size()));
        break;
      case Kind::kTensor: {
        TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, shown.opened.index().At(s.ordinal));
        TENSORMOUNT_RETURN_IF_ERROR(shown.opened.ReadBytes(
            tensor, s.skip, bytes.data(), bytes.size(), ReadVerify::kExtendLeaves, nullptr));
        break;
      }
      case Kind::kBox: {
        const FileSegments::BoxSource& box = segments.box(s.ordinal);
        const TensorMeta& meta = box.tensor.meta;
        std::string whole(meta.bytes(), '\0');
        TENSORMOUNT_RETURN_IF_ERROR(shown.opened.ReadBytes(
            box.tensor, 0, whole.data(), whole.size(), ReadVerify::kExtendLeaves, nullptr));
        bytes = CutBox(whole, meta.bits() / 8, meta.shape(), box.box, box.container);
        EXPECT_EQ(box.bytes, s.length);
        break;
      }
      case Kind::kObject:
        return Status(Code::kUnsupported, "objects");
    }
    out += bytes;
  }
  EXPECT_EQ(out.size(), segments.size());
  return out;
}

// Along a path below the view.
inline Result<ViewNode> WalkView(const View& view, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode at, view.Stat(View::kRoot));
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t slash = std::min(path.find('/', begin), path.size());
    TENSORMOUNT_ASSIGN_OR_RETURN(const ViewChild child,
                                 view.Lookup(at.item, path.substr(begin, slash - begin)));
    at = child.node;
    begin = slash + 1;
  }
  return at;
}

// The bytes of a file; its size is checked against what Stat says.
inline Result<std::string> ReadView(const ShownCheckpoint& shown, const View& view,
                                    const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ViewNode node, WalkView(view, path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileSegments segments, view.Open(node.item));
  EXPECT_EQ(segments.size(), node.size) << path;
  return ReadInventory(shown, segments);
}

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_TESTS_FS_SHOWN_FIXTURE_H_
