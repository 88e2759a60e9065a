// SPDX-License-Identifier: Apache-2.0
// Modification times of tensors and objects. A file that is equal in all priors keeps its time, so
// that rsync and make see only changes.
#include "index/store/mtime.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace tensormount {
namespace {

// Result of comparing one file with the priors. If any prior differs, the file counts as changed: a
// file that changed and changed back must not get an old time, or a copy of the version in between
// would look newer.
struct PriorComparison {
  bool any = false;
  bool differs = false;
  std::int64_t latest = std::numeric_limits<std::int64_t>::min();

  void Add(bool same, std::int64_t mtime) {
    any = true;
    differs = differs || !same;
    latest = std::max(latest, mtime);
  }
};

std::int64_t TimeAfter(std::int64_t now, std::int64_t earlier) {
  // Only damage gives the largest possible time. Adding 1 to it must not wrap to the past.
  const bool last = earlier == std::numeric_limits<std::int64_t>::max();
  return std::max(now, last ? earlier : earlier + 1);
}

// Applies the table of mtime.h to one file.
std::int64_t Decide(const PriorComparison& seen, std::int64_t now, std::int64_t fresh) {
  if (!seen.any) return fresh;
  return seen.differs ? TimeAfter(now, seen.latest) : seen.latest;
}

// Whether digest, dtype and shape are equal. Tensors without digests are never equal.
bool SameTensor(const TensorRecord& a, const TensorEntry& b) {
  return a.has_digest && b.has_digest && a.digest == b.digest && a.meta.dtype() == b.meta.dtype() &&
         a.meta.shape() == b.meta.shape();
}

int ComparePart(const ObjectRecord& a, const ObjectRecord& b) {
  if (const int c = a.key.compare(b.key); c != 0) return c;
  const auto x = a.index.span();
  const auto y = b.index.span();
  if (std::equal(x.begin(), x.end(), y.begin(), y.end())) return 0;
  return std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end()) ? -1 : 1;
}

}  // namespace

Status DecideMtimes(std::span<const CheckpointIndex* const> priors, std::int64_t now,
                    Inventory& inventory) {
  std::vector<PriorComparison> tensors(inventory.tensors.size());
  std::vector<PriorComparison> objects(inventory.objects.size());
  PriorComparison common;
  PriorComparison json;
  for (const CheckpointIndex* prior : priors) {
    // Both lists are sorted by key, so one pass suffices.
    std::size_t i = 0;
    TENSORMOUNT_RETURN_IF_ERROR(prior->ForEachTensor(0, [&](const TensorEntry& entry) {
      int order = 1;
      while (i < inventory.tensors.size() &&
             (order = inventory.tensors[i].meta.key().compare(entry.meta.key())) < 0) {
        ++i;
      }
      if (i == inventory.tensors.size()) return false;
      if (order == 0) tensors[i].Add(SameTensor(inventory.tensors[i], entry), entry.mtime);
      return true;
    }));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts, prior->Objects());
    i = 0;
    for (const ObjectRecord& part : parts) {
      while (i < inventory.objects.size() && ComparePart(inventory.objects[i], part) < 0) ++i;
      if (i == inventory.objects.size()) break;
      const ObjectRecord& mine = inventory.objects[i];
      if (ComparePart(mine, part) != 0) continue;
      const bool same = mine.has_hash() && part.has_hash() && mine.grid == part.grid &&
                        mine.length == part.length && mine.hash == part.hash;
      objects[i].Add(same, part.mtime);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const CommonValues values, prior->CommonRecords());
    common.Add(inventory.common == values, prior->info().common_mtime);
    json.Add(false, prior->info().json_mtime);
  }
  const std::int64_t fresh = json.any ? TimeAfter(now, json.latest) : now;
  inventory.info.json_mtime = fresh;
  inventory.info.common_mtime = Decide(common, now, fresh);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    inventory.tensors[i].mtime = Decide(tensors[i], now, fresh);
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    inventory.objects[i].mtime = Decide(objects[i], now, fresh);
  }
  return Status();
}

}  // namespace tensormount
