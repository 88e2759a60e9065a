// SPDX-License-Identifier: Apache-2.0
// hf/: a folder as transformers reads it: parts, their index, and config files that were saved as
// objects.
#include "fs/views/hf_view.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "fs/answers.h"
#include "index/records/glob_captures.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// What transformers and tokenizers look for beside a model's tensors.
constexpr std::array<std::string_view, 9> kCarriedNames = {
    "config.json",   "generation_config.json",  "tokenizer*.json",   "tokenizer.model",
    "vocab.*",       "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template*"};

bool IsCarried(std::string_view name) {
  return std::any_of(kCarriedNames.begin(), kCarriedNames.end(), [&](std::string_view pattern) {
    return GlobCaptures(pattern, name).has_value();
  });
}

}  // namespace

Result<std::unique_ptr<const View>> HfView::Make(const ShownCheckpoint& shown, const View& whole,
                                                 const HfOptions& options) {
  TENSORMOUNT_RETURN_IF_ERROR(HfParts::CheckRules(shown, options));
  std::unique_ptr<HfView> view(new HfView(shown, whole, options));
  view->FindCarried();
  return std::unique_ptr<const View>(std::move(view));
}

void HfView::FindCarried() {
  // By name; of several objects of one name the one that is called so as a whole, else the first.
  struct Found {
    std::uint32_t part = 0;
    bool whole = false;
  };
  std::map<std::string, Found> found;
  const std::vector<ObjectRecord>& parts = shown_.objects.parts();
  for (std::uint32_t i = 0; i < parts.size(); ++i) {
    if (parts[i].grid.rank() > 0) continue;
    const std::string& key = parts[i].key;
    const std::size_t slash = key.rfind('/');
    const std::string name = slash == std::string::npos ? key : key.substr(slash + 1);
    if (!IsCarried(name)) continue;
    const bool whole = slash == std::string::npos;
    const auto [it, added] = found.try_emplace(name, Found{i, whole});
    if (!added && whole && !it->second.whole) it->second = {i, whole};
  }
  for (auto& [name, object] : found) carried_.push_back({name, object.part});
}

Result<std::shared_ptr<const HfParts>> HfView::Parts() const {
  const std::lock_guard lock(mutex_);
  if (!parts_) {
    const Result<ViewNode> whole = whole_.Stat(kRoot);
    if (!whole.ok() && whole.status().code() != Code::kNotFound) return whole.status();
    TENSORMOUNT_ASSIGN_OR_RETURN(
        parts_, HfParts::Make(shown_, options_, whole.ok() ? whole.value().size : 0));
  }
  return parts_;
}

Result<std::shared_ptr<const GeneratedText>> HfView::Index() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (!parts->has_index()) return StaleNode("hf/");
  const std::lock_guard lock(mutex_);
  if (!index_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(index_, parts->IndexJson());
  }
  return index_;
}

Result<HfParts::File> HfView::PartFile(const HfParts& parts, std::size_t part) const {
  const std::lock_guard lock(mutex_);
  auto it = kept_.find(part);
  if (it == kept_.end()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(HfParts::File file, parts.Build(part));
    kept_bytes_ += file.memory();
    it = kept_.emplace(part, Kept{.file = std::move(file)}).first;
  }
  it->second.used = ++uses_;
  const HfParts::File file = it->second.file;
  while (kept_bytes_ > kKeptBytes && kept_.size() > 1) {
    const auto oldest = std::min_element(
        kept_.begin(), kept_.end(),
        [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
    kept_bytes_ -= oldest->second.file.memory();
    kept_.erase(oldest);
  }
  return file;
}

Result<std::string> HfView::NameOf(std::uint64_t item) const {
  if (item == kRoot) return std::string();
  if (item >= kFirstCarried && item < first_part()) return carried_[item - kFirstCarried].name;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (item == kIndexItem && parts->has_index()) return std::string(kIndexFile);
  if (item < first_part() || item - first_part() >= parts->parts().size()) return StaleNode("hf/");
  return parts->NameOf(item - first_part());
}

std::string HfView::PathOf(std::uint64_t item) const {
  const Result<std::string> name = NameOf(item);
  return name.ok() && !name.value().empty() ? "hf/" + name.value() : "hf";
}

Result<ViewNode> HfView::Stat(std::uint64_t item) const {
  ViewNode node{.item = item, .folder = item == kRoot};
  node.mtime = shown_.opened.index().info().json_mtime;
  if (item == kRoot) {
    if (shown_.tensors.count() == 0) {
      return Status(Code::kNotFound, "no hf here: the checkpoint has no tensors");
    }
    return node;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(node.identity, NameOf(item));
  if (item == kIndexItem) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, Index());
    node.size = text->size();
  } else if (item < first_part()) {
    const ObjectRecord& object = shown_.objects.parts()[carried_[item - kFirstCarried].part];
    node.size = object.length;
    node.mtime = object.mtime;
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
    node.size = parts->parts()[item - first_part()].size();
  }
  return node;
}

Result<ViewChild> HfView::Lookup(std::uint64_t folder, std::string_view name) const {
  if (folder != kRoot) return Status::FromErrno(ENOTDIR, "look up", name);
  const auto found = [&](std::uint64_t item) -> Result<ViewChild> {
    TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, Stat(item));
    return ViewChild{.name = std::string(name), .node = std::move(node)};
  };
  const auto carried =
      std::lower_bound(carried_.begin(), carried_.end(), name,
                       [](const Carried& c, std::string_view n) { return c.name < n; });
  if (carried != carried_.end() && carried->name == name) {
    return found(kFirstCarried + static_cast<std::uint64_t>(carried - carried_.begin()));
  }
  // Programs look for many files that are not there: a model is laid out for one of its own only.
  const Status none(Code::kNotFound, "no " + std::string(name) + " here");
  if (!name.starts_with("model")) return none;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (name == kIndexFile && parts->has_index()) return found(kIndexItem);
  if (parts->parts().size() == 1) {
    if (name == parts->NameOf(0)) return found(first_part());
    return none;
  }
  constexpr std::string_view kPrefix = "model-";
  if (!name.starts_with(kPrefix)) return none;
  std::uint64_t number = 0;
  for (const char c : name.substr(kPrefix.size(), 10)) {
    if (c < '0' || c > '9') break;
    number = number * 10 + static_cast<std::uint64_t>(c - '0');
  }
  if (number == 0 || number > parts->parts().size() || parts->NameOf(number - 1) != name) {
    return none;
  }
  return found(first_part() + number - 1);
}

Status HfView::List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const {
  if (folder != kRoot) return Status::FromErrno(ENOTDIR, "list", PathOf(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  const std::uint64_t end = first_part() + parts->parts().size();
  // A cookie is the item that comes next.
  for (std::uint64_t item = std::max(cookie, kIndexItem); item < end; ++item) {
    if (item == kIndexItem && !parts->has_index()) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string name, NameOf(item));
    TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, Stat(item));
    if (!fn(ViewChild{.name = std::move(name), .node = std::move(node)}, item + 1)) return {};
  }
  return {};
}

Result<FileSegments> HfView::Open(std::uint64_t item) const {
  FileSegments content;
  if (item == kRoot) return Status::FromErrno(EISDIR, "open", "hf");
  if (item == kIndexItem) {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto text, Index());
    content.AddText(std::move(text));
    return content;
  }
  if (item >= kFirstCarried && item < first_part()) {
    const std::uint32_t part = carried_[item - kFirstCarried].part;
    content.AddObject(part, shown_.objects.parts()[part].length);
    return content;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (item < first_part() || item - first_part() >= parts->parts().size()) return StaleNode("hf/");
  if (parts->is_whole()) return whole_.Open(kRoot);
  TENSORMOUNT_ASSIGN_OR_RETURN(const HfParts::File file, PartFile(*parts, item - first_part()));
  return FileSegments::Shared(file.segments, file.header);
}

Result<std::map<std::string, std::string>> HfView::Attributes(std::uint64_t item) const {
  std::map<std::string, std::string> all;
  if (item >= kFirstCarried && item < first_part()) {
    all.emplace("key", shown_.objects.parts()[carried_[item - kFirstCarried].part].key);
  }
  return all;
}

}  // namespace tensormount::fs
