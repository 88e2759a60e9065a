// SPDX-License-Identifier: Apache-2.0
// `tensormount adopt` (commands.h): options and report; index/foreign/adopt.h adopts the source.
#include "index/foreign/adopt.h"

#include <algorithm>
#include <optional>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/file_system_for.h"
#include "index/store/store.h"
#include "mount-tools/commands.h"
#include "mount-tools/interrupt.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

// Total size in bytes of all files in a directory and below. The report uses it for the
// checkpoint's own files (manifests, index and commit record).
Result<std::uint64_t> BytesBelow(FileSystem& fs, const std::string& folder) {
  std::uint64_t bytes = 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(folder));
  for (const DirectoryEntry& entry : entries) {
    const std::string path = JoinPath(folder, entry.name);
    if (entry.kind == FileKind::kDirectory) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t inside, BytesBelow(fs, path));
      bytes += inside;
    } else {
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(path));
      bytes += info.size;
    }
  }
  return bytes;
}

// The values of the report; `path` is the new checkpoint, `root` the directory of its data.
struct Outcome {
  std::string format;
  std::string root;
  Store::Published published;
  std::string path;
  std::uint64_t data_bytes = 0;
  // Size of the checkpoint's own files; nullopt if it cannot be determined, which is not an error.
  std::optional<std::uint64_t> index_bytes;
};

Result<Outcome> Adopt(const AdoptArgs& args, const Interrupt& interrupt, Terminal& terminal) {
  if (args.if_exists != "fail" && args.if_exists != "replace") {
    return Status(Code::kInvalidArgument,
                  fmt::format("--if-exists {}: must be fail or replace", args.if_exists));
  }
  AdoptOptions options;
  TENSORMOUNT_ASSIGN_OR_RETURN(options.map, ReadKeyMap(args.map));
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName to, SplitAdoptPath(args.destination));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened,
                               OpenSource(args.source, terminal, LossPolicyOf(args.partial)));
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsForeign(*opened));
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(to.store));
  TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::OpenOrCreate(*fs, to.store, to.name));
  options.hashes = !args.quick;
  options.if_exists = args.if_exists == "replace" ? IfExists::kReplace : IfExists::kFail;
  Outcome out;
  {
    // The destructor of `progress` erases the progress line before the report is printed.
    Progress progress(terminal, "adopt " + to.name);
    options.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return interrupt.Check();
    };
    TENSORMOUNT_ASSIGN_OR_RETURN(out.published,
                                 AdoptSource(store.fs(), *opened, store, to.name, options));
  }
  // The report takes these values from the source, so that the new checkpoint need not be opened.
  out.format = opened->index().info().producer;
  out.root = opened->index().info().root;
  out.path = store.CheckpointPath(to.name);
  out.data_bytes = out.published.bytes;  // Without the tensors that the key map drops.
  const Result<std::uint64_t> index_bytes = BytesBelow(store.fs(), out.path);
  if (index_bytes.ok()) out.index_bytes = index_bytes.value();
  return out;
}

}  // namespace

int RunAdopt(const AdoptArgs& args, Terminal& terminal) {
  const Interrupt interrupt;
  const Result<Outcome> adopted = Adopt(args, interrupt, terminal);
  if (!adopted.ok()) {
    return interrupt.ExitStatus(adopted.status(), terminal.Fail(adopted.status()));
  }
  const Outcome& out = adopted.value();
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{
        {"adopted", out.path},
        {"uuid", out.published.info.uuid.ToString()},
        {"format", out.format},
        {"root", out.root},
        {"tensors", out.published.tensors},
        {"chunks", out.published.chunks},
        {"bytes", out.data_bytes},
        {"bytes_hashed", args.quick ? 0 : out.published.bytes},
        {"index_bytes",
         out.index_bytes ? nlohmann::ordered_json(*out.index_bytes) : nlohmann::ordered_json()},
        {"self_contained", false}});
    return terminal.Flush();
  }
  if (!terminal.quiet) {
    terminal.Line(fmt::format("adopted {} ({}) as {}: {}, {}, {}", out.root, out.format, out.path,
                              Counted(out.published.tensors, "tensor"),
                              Counted(out.published.chunks, "chunk"), HumanBytes(out.data_bytes)));
    terminal.Line(args.quick
                      ? std::string("no data was read (--quick): later reads are not verified")
                      : fmt::format("{} hashed", HumanBytes(out.published.bytes)));
    if (out.index_bytes && out.data_bytes > 0) {
      terminal.Line(fmt::format(
          "the index takes {}, {:.3f} % of the data", HumanBytes(*out.index_bytes),
          100.0 * static_cast<double>(*out.index_bytes) / static_cast<double>(out.data_bytes)));
    }
    terminal.Line(
        fmt::format("not self-contained: the data stay in {} and are read from there", out.root));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
