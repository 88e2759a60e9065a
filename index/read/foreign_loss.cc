// SPDX-License-Identifier: Apache-2.0
// Texts of losses for warnings, for reports of verify, and for the entry "lost" of the content
// metadata. They name only a few keys, because a missing file may have contained ten thousand
// tensors.
#include "index/read/foreign_loss.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "base/counted.h"
#include "base/glob.h"

namespace tensormount {
namespace {

constexpr std::size_t kShownLosses = 3;
constexpr std::size_t kShownKeyBytes = 256;

}  // namespace

std::string ForeignLoss::Summary() const {
  if (tensors.size() == 1 && objects.empty())
    return "tensor " + tensors[0].substr(0, kShownKeyBytes);
  if (objects.size() == 1 && tensors.empty())
    return "object " + objects[0].substr(0, kShownKeyBytes);
  if (tensors.empty() && objects.empty()) return "the contents of the file";
  if (objects.empty()) return Counted(tensors.size(), "tensor");
  if (tensors.empty()) return Counted(objects.size(), "object");
  return Counted(tensors.size(), "tensor") + " and " + Counted(objects.size(), "object");
}

std::string ForeignLoss::Examples() const {
  if (tensors.size() + objects.size() < 2) return {};
  std::string text;
  std::size_t shown = 0;
  for (const std::vector<std::string>* keys : {&tensors, &objects}) {
    for (const std::string& key : *keys) {
      if (shown++ == kShownLosses) return text + ", ...";
      text += (text.empty() ? ": " : ", ") + key.substr(0, kShownKeyBytes);
    }
  }
  return text;
}

std::string ForeignLoss::ToString() const {
  if (file.empty()) {
    return Summary() + ": " + (holes ? "" : "left out: ") + reason + Examples();
  }
  if (tensors.empty() && objects.empty())
    return file + ": " + reason + ": the contents of the file are lost";
  if (holes) return file + ": " + reason + ": parts of " + Summary() + " are lost" + Examples();
  const bool one = tensors.size() + objects.size() <= 1;
  return file + ": " + reason + ": " + Summary() + (one ? " is left out" : " are left out") +
         Examples();
}

Status CheckNoLoss(std::span<const ForeignLoss> lost, const std::string& keys) {
  std::string text;
  std::size_t more = 0;
  for (const ForeignLoss& loss : lost) {
    const auto chosen = [&](const std::string& key) { return GlobMatches(keys, key); };
    const bool known = !loss.tensors.empty() || !loss.objects.empty();
    if (!keys.empty() && known && std::ranges::none_of(loss.tensors, chosen) &&
        std::ranges::none_of(loss.objects, chosen)) {
      continue;
    }
    if (text.empty()) {
      text = loss.ToString();
    } else {
      ++more;
    }
  }
  if (text.empty()) return {};
  if (more > 0) text += "; and " + std::to_string(more) + " more";
  return {Code::kDataLoss, std::move(text)};
}

}  // namespace tensormount
