// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_TORCH_TEXT_H_
#define TENSORMOUNT_FS_EXPORT_TORCH_TEXT_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/export/pickle_writer.h"
#include "fs/export/zip_writer.h"
#include "fs/views/checkpoint_view.h"
#include "shard/tensor_meta.h"

// What the two formats of torch share: how a tensor is described in a pickle, the small entries of
// an archive, and where a state dict's values stand in nested dicts.

namespace tensormount::fs {

// A CPU tensor of packed rows over the storage of that name: what torch.save writes of one.
// `dtype` has a torch name.
// torch rebuilds it as _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks),
// where storage is a persistent id ("storage", type, name, "cpu", elements) and the bytes are the
// archive's entry data/NAME. Types without a storage class of their own use the untyped storage and
// _rebuild_tensor_v3.
void PickleTensor(PickleWriter& pickle, DType dtype, const Dims& shape, std::string_view storage);
// "torch", "bfloat16".
void PickleDType(PickleWriter& pickle, DType dtype);

// What stands in an archive between data.pkl and the storages, and behind them.
// torch.load wants byteorder and version; the others are what torch 2.13 writes.
void AddEntriesBeforeData(ZipWriter& zip, std::string& out);
void AddEntriesAfterData(ZipWriter& zip, std::string& out);

// The common value of an adopted DCP checkpoint that says where its values stand in nested dicts
// and lists: a dict of tuples of names and indices.
// Kept when such a checkpoint is adopted or imported, so that an export can give the nesting back.
inline constexpr std::string_view kPlannerData = "torch.planner_data";

// Paths of keys in nested dicts and lists. Those that kPlannerData does not tell are the key alone.
// Example: the key "optim.state.0.exp_avg" has the path ("optim", "state", 0, "exp_avg"), which no
// rule could tell from the key: the 0 is an integer, and a key may have dots.
class PlannerPaths {
 public:
  // What is malformed in it is passed over: keys then stand for themselves.
  static Result<PlannerPaths> Make(const CommonValues& values);
  bool nested() const { return !paths_.empty(); }
  // `stored`: the key that the checkpoint has; a path holds only where it is the shown one too.
  std::vector<CommonKey> PathOf(std::string_view shown, std::string_view stored) const;

 private:
  std::map<std::string, std::vector<CommonKey>, std::less<>> paths_;
};

// Of number `n` of the shown tensors, which is shown as `shown_key`.
Result<std::string> StoredTensorKey(const ShownCheckpoint& shown, std::uint32_t n,
                                    std::string_view shown_key);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_TORCH_TEXT_H_
