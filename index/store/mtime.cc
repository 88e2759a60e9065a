// SPDX-License-Identifier: Apache-2.0
// Modification times of tensors and objects: a part that is equal to that of the checkpoint before
// keeps its time, so that rsync and make see what changed and nothing else.
#include "index/store/mtime.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace tensormount {
namespace {

// What the priors say of one file of the tree.
// "Differs" wins over "the same": a file that changed and changed back must not get an old time, or
// a copy of the version between would look newer.
struct Seen {
  bool any = false;
  bool differs = false;
  std::int64_t latest = std::numeric_limits<std::int64_t>::min();

  void Add(bool same, std::int64_t mtime) {
    any = true;
    differs = differs || !same;
    latest = std::max(latest, mtime);
  }
};

std::int64_t After(std::int64_t now, std::int64_t earlier) {
  // A time at the end of time can only be damage; it must not wrap round to a past one.
  const bool last = earlier == std::numeric_limits<std::int64_t>::max();
  return std::max(now, last ? earlier : earlier + 1);
}

// The table is in mtime.h.
std::int64_t Decide(const Seen& seen, std::int64_t now, std::int64_t fresh) {
  if (!seen.any) return fresh;
  return seen.differs ? After(now, seen.latest) : seen.latest;
}

// Digest, dtype and shape: without digests nothing is known to be the same.
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
  std::vector<Seen> tensors(inventory.tensors.size());
  std::vector<Seen> objects(inventory.objects.size());
  Seen common;
  Seen json;
  for (const CheckpointIndex* prior : priors) {
    // Both sides are sorted by key: one pass.
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
  const std::int64_t fresh = json.any ? After(now, json.latest) : now;
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
