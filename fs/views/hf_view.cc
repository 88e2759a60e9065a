// SPDX-License-Identifier: Apache-2.0
// hf/: a directory as transformers reads it: parts, their index, and config files that were saved
// as objects.
#include "fs/views/hf_view.h"

#include <algorithm>
#include <cerrno>

#include <nlohmann/json.hpp>

#include "fs/answers.h"
#include "index/foreign/model_files.h"

namespace tensormount::fs {
namespace {

constexpr std::uint64_t kMaxConfigBytes = 1 << 20;
const std::string kConfigFile = "config.json";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// Name of an object in hf/: the last name of its key.
std::string_view CarriedName(const ObjectRecord& object) {
  return std::string_view(object.key).substr(object.key.rfind('/') + 1);
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
  // Objects by their name in hf/. A key without a directory has priority over others with the same
  // last name (carried_). Parts of a grid are not considered.
  std::map<std::string_view, std::uint32_t> found;
  const std::vector<ObjectRecord>& parts = shown_.objects.parts();
  for (const bool whole : {true, false}) {
    for (std::uint32_t i = 0; i < parts.size(); ++i) {
      const std::string_view name = CarriedName(parts[i]);
      if (parts[i].grid.rank() > 0 || (name == parts[i].key) != whole) continue;
      if (IsModelFile(name)) found.try_emplace(name, i);
    }
  }
  std::map<std::string, Carried> all;
  for (const auto& [name, part] : found) {
    all[std::string(name)] = {.name = std::string(name), .part = part, .bytes = nullptr};
  }
  if (options_.beside) {
    for (const auto& [name, bytes] : *options_.beside) {
      all[name] = {.name = name, .part = 0, .bytes = bytes};
    }
  }
  const MadeConfig* const made = shown_.opened.made_config();
  if (made != nullptr && !made->text.empty() && !all.contains(kConfigFile)) {
    all[kConfigFile] = {
        .name = kConfigFile, .part = 0, .bytes = std::make_shared<const std::string>(made->text)};
  }
  for (auto& [name, carried] : all) carried_.push_back(std::move(carried));
}

bool HfView::HasTiedEmbeddings() const {
  const auto config = std::ranges::find(carried_, kConfigFile, &Carried::name);
  if (config == carried_.end() || SizeOf(*config) > kMaxConfigBytes) return false;
  std::string text(static_cast<std::size_t>(SizeOf(*config)), '\0');
  if (config->bytes) {
    text = *config->bytes;
  } else if (!shown_.opened.ReadObject(ObjectOf(*config), 0, text.data(), text.size()).ok()) {
    return false;
  }
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  bool tied = false;
  bool apart = false;
  const auto look = [&](const nlohmann::json& of) {
    const auto said = of.find("tie_word_embeddings");
    if (said == of.end() || !said->is_boolean()) return;
    (said->get<bool>() ? tied : apart) = true;
  };
  if (!json.is_object()) return false;
  look(json);
  // Multimodal models have the text model's configuration within their own. If the two differ,
  // transformers releases disagree on which one counts, so this function returns false.
  if (const auto text_config = json.find("text_config");
      text_config != json.end() && text_config->is_object()) {
    look(*text_config);
  }
  return tied && !apart;
}

Result<std::shared_ptr<const HfParts>> HfView::Parts() const {
  const std::lock_guard lock(mutex_);
  if (!parts_) {
    // The size of model.safetensors; kNotFound means that its header would be too long. Other
    // failures are returned.
    const Result<ViewNode> whole = whole_.Stat(kRoot);
    if (!whole.ok() && whole.status().code() != Code::kNotFound) return whole.status();
    TENSORMOUNT_ASSIGN_OR_RETURN(
        parts_,
        HfParts::Make(shown_, options_, whole.ok() ? whole.value().size : 0, HasTiedEmbeddings()));
  }
  return parts_;
}

Result<std::shared_ptr<const GeneratedText>> HfView::Index() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (!parts->has_index()) return StaleNodeError("hf/");
  const std::lock_guard lock(mutex_);
  if (!index_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(index_, parts->IndexJson());
  }
  return index_;
}

Result<FileSegments> HfView::PartFile(const HfParts& parts, std::size_t part) const {
  const std::lock_guard lock(mutex_);
  // The lock is held throughout, so that concurrent opens of a part lay it out once. Open files
  // keep their segments if these are evicted here.
  std::shared_ptr<const FileSegments> file = part_files_.Get(part);
  if (!file) {
    TENSORMOUNT_ASSIGN_OR_RETURN(FileSegments made, parts.Build(part));
    const std::size_t bytes =
        made.literal(0).size() + made.segments().size() * sizeof(FileSegments::Segment);
    file = part_files_.Put(part, std::make_shared<const FileSegments>(std::move(made)), bytes);
  }
  return *file;
}

Result<std::string> HfView::NameOf(std::uint64_t item) const {
  if (item == kRoot) return std::string();
  if (item >= kFirstCarried && item < first_part()) {
    return CarriedAt(item).name;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (item == kIndexItem && parts->has_index()) return std::string(kIndexFile);
  if (item < first_part() || item - first_part() >= parts->parts().size())
    return StaleNodeError("hf/");
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
      return Status(Code::kNotFound, "the checkpoint has no hf/, because it has no tensors");
    }
    return node;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(node.identity, NameOf(item));
  if (item == kIndexItem) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, Index());
    node.size = text->size();
  } else if (item < first_part()) {
    node.size = SizeOf(CarriedAt(item));
    if (!CarriedAt(item).bytes) node.mtime = ObjectOf(CarriedAt(item)).mtime;
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
  const auto carried = std::ranges::lower_bound(carried_, name, {}, &Carried::name);
  if (carried != carried_.end() && carried->name == name) {
    return found(kFirstCarried + static_cast<std::uint64_t>(carried - carried_.begin()));
  }
  // Programs probe many files that do not exist, so the parts are laid out only for names of model
  // files.
  const Status none(Code::kNotFound, "no file " + std::string(name) + " in hf/");
  if (!name.starts_with("model")) return none;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (name == kIndexFile && parts->has_index()) return found(kIndexItem);
  if (parts->parts().size() == 1) {
    if (name == parts->NameOf(0)) return found(first_part());
    return none;
  }
  // The number is parsed and the name rebuilt from it, so that only the exact spelling is found.
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
  // A cookie is the number of the next item.
  for (std::uint64_t item = std::max(cookie, kIndexItem); item < end; ++item) {
    if (item == kIndexItem && !parts->has_index()) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string name, NameOf(item));
    TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, Stat(item));
    if (!fn(ViewChild{.name = std::move(name), .node = std::move(node)}, item + 1)) return {};
  }
  return {};
}

Result<FileSegments> HfView::Open(std::uint64_t item) const {
  FileSegments segments;
  if (item == kRoot) return Status::FromErrno(EISDIR, "open", "hf");
  if (item == kIndexItem) {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto text, Index());
    segments.AddText(std::move(text));
    return segments;
  }
  if (item >= kFirstCarried && item < first_part()) {
    const Carried& carried = CarriedAt(item);
    if (carried.bytes) {
      segments.AddLiteral(carried.bytes);
    } else {
      segments.AddObject(carried.part, SizeOf(carried));
    }
    return segments;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, Parts());
  if (item < first_part() || item - first_part() >= parts->parts().size())
    return StaleNodeError("hf/");
  // The segments are those of model.safetensors, but the node is another, so the kernel caches the
  // bytes of both files separately.
  if (parts->is_whole()) return whole_.Open(kRoot);
  return PartFile(*parts, item - first_part());
}

Result<std::map<std::string, std::string>> HfView::Attributes(std::uint64_t item) const {
  std::map<std::string, std::string> all;
  if (item >= kFirstCarried && item < first_part() && !CarriedAt(item).bytes) {
    all.emplace("key", ObjectOf(CarriedAt(item)).key);
  }
  return all;
}

}  // namespace tensormount::fs
