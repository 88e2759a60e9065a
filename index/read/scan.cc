// SPDX-License-Identifier: Apache-2.0
// The order of a scan, its threads, and the findings of one range.
#include "index/read/scan.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/parallel.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// Positions in the result are identifiers: adoption writes hashes back by position.
std::vector<ScanRange> RangesOf(const Inventory& inventory) {
  std::vector<ScanRange> ranges;
  for (std::uint32_t t = 0; t < inventory.tensors.size(); ++t) {
    const ExtentTable& extents = inventory.tensors[t].extents;
    for (std::uint32_t row = 0; row < extents.size(); ++row) {
      ScanRange range{.owner = t, .row = row};
      if (const Result<ChunkRecord> chunk = extents.At(row); chunk.ok()) {
        range.file = chunk.value().file;
        range.offset = chunk.value().offset;
        range.length = chunk.value().length;
      }
      ranges.push_back(range);
    }
  }
  for (std::uint32_t i = 0; i < inventory.objects.size(); ++i) {
    const ObjectRecord& object = inventory.objects[i];
    ranges.push_back({.kind = ScanRange::Kind::kObject,
                      .owner = i,
                      .file = object.file,
                      .offset = object.offset,
                      .length = object.length});
  }
  for (std::uint32_t i = 0; i < inventory.extras.size(); ++i) {
    const ExtraRange& extra = inventory.extras[i];
    ranges.push_back({.kind = ScanRange::Kind::kExtra,
                      .owner = i,
                      .file = extra.file,
                      .offset = extra.offset,
                      .length = extra.length});
  }
  return ranges;
}

std::string RangeName(const Inventory& inventory, const ScanRange& range) {
  switch (range.kind) {
    case ScanRange::Kind::kChunk: {
      const TensorRecord& tensor = inventory.tensors[range.owner];
      const Result<ChunkRecord> chunk = tensor.extents.At(range.row);
      return "tensor " + tensor.meta.key() +
             (chunk.ok() ? " " + chunk.value().region.ToString() : std::string());
    }
    case ScanRange::Kind::kObject: {
      const ObjectRecord& object = inventory.objects[range.owner];
      return "object " + object.key +
             (object.grid.rank() > 0 ? " part " + object.index.ToString() : std::string());
    }
    case ScanRange::Kind::kExtra:
      break;
  }
  return "header";
}

// State of a thread. ForEachParallel makes one for each thread; the buffer and the open file live
// as long as the thread.
struct Scan::Worker {
  StoredRangeScanner reader;
  std::unique_ptr<File> file;  // File of the previous range.
  std::uint32_t number = kNoFile;
  Status ended;  // Failure of the watch.
};

// Threads take ranges in file order, so they read neighbouring parts of a file: read-ahead works,
// and a thread opens a file once for many ranges.
Status Scan::Run(const std::vector<ScanRange>& ranges, const Visit& visit) {
  std::vector<std::size_t> order(ranges.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(ranges[a].file, ranges[a].offset) < std::tie(ranges[b].file, ranges[b].offset);
  });
  done_ = 0;
  total_ = 0;
  for (const ScanRange& range : ranges) total_ += range.length;
  return ForEachParallel<Worker>(order.size(), threads_, [&](std::size_t i, Worker& worker) {
    ScanFinding found;
    Read(ranges[order[i]], worker, found);
    TENSORMOUNT_RETURN_IF_ERROR(worker.ended);  // This ends the scan; it is not a finding.
    return visit(order[i], found);
  });
}

// Every failure sets a step and a status in `found`, because verify has to name each range.
void Scan::Read(const ScanRange& range, Worker& worker, ScanFinding& found) {
  const auto failed = [&](ScanFinding::Step step, Status why) {
    found.step = step;
    found.failure = std::move(why);
  };
  std::vector<PlacedBox> boxes;
  Dims byte_shape;
  if (range.kind == ScanRange::Kind::kChunk) {
    const TensorRecord& tensor = inventory_.tensors[range.owner];
    const TensorMeta& meta = tensor.meta;
    const Result<ChunkRecord> chunk = tensor.extents.At(range.row);
    if (!chunk.ok()) return failed(ScanFinding::Step::kRecord, chunk.status());
    if (!chunk.value().pending) {
      auto placed =
          PlaceChunk(meta.dtype(), meta.shape(), chunk.value().region, 0, chunk.value().strides);
      if (!placed.ok()) return failed(ScanFinding::Step::kRecord, placed.status());
      if (range.digest) boxes = std::move(placed).value();
      byte_shape = ByteShape(meta.dtype(), meta.shape());
    }
  }
  if (range.file >= inventory_.files.size()) {
    return failed(
        ScanFinding::Step::kRecord,
        Status(Code::kDataLoss, "the record refers to a file that is not in the file table"));
  }
  if (!worker.file || worker.number != range.file) {
    worker.file.reset();  // Closed before the next open, so that each thread needs one descriptor.
    auto file = files_.open(range.file);
    if (!file.ok()) return failed(ScanFinding::Step::kOpen, file.status());
    worker.file = std::move(file).value();
    worker.number = range.file;
  }
  const Status status = worker.reader.Read(
      *worker.file, range.offset, range.length, boxes, byte_shape,
      [&](std::uint64_t bytes) {
        const std::uint64_t done = done_ += bytes;
        // `done` may exceed the total, because ranges of foreign files may overlap and some bytes
        // are read twice.
        if (watch_) worker.ended = watch_(std::min(done, total_), total_);
        return worker.ended;
      },
      found.read);
  // The file is checked before a read failure is reported, because a replaced or truncated file may
  // be the cause.
  if (Status still = files_.check(range.file, *worker.file); !still.ok()) {
    return failed(ScanFinding::Step::kCheck, std::move(still));
  }
  if (!status.ok()) return failed(ScanFinding::Step::kRead, status);
}

}  // namespace tensormount
