// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CLASSES_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CLASSES_H_

#include <cstdint>
#include <string_view>

// The allow-list of names that a pickle may speak of, and what they mean to us: classes and
// functions of PyTorch, Megatron-Core, OLMo-core, NumPy and the standard library, under every
// module path that a release has written (pickle_classes.cc has the table with its sources).

// A list of what is allowed and not of what is dangerous: a name that nobody thought of is refused.
// Being on it grants nothing but to be mentioned: no name is ever looked up, imported or called.
namespace tensormount::pickle {

// One a meaning, not one a name: names that were moved or renamed between releases, and names that
// are used in the same way, share one. kTrainerRecord and the "other" ones mean: may stand there,
// is kept as a record, and nobody here looks into it.
enum class KnownClass : std::uint8_t {
  kUnknown = 0,
  // torch.distributed.checkpoint
  // The classes of a .metadata, and of the plans of a save, which some releases put into it.
  kMetadata,
  kTensorStorageMetadata,
  kChunkStorageMetadata,
  kBytesStorageMetadata,
  kTensorProperties,
  kMemFormatEncoding,
  kMetadataIndex,
  kStorageInfo,
  kStorageMeta,
  kSavePlan,
  kWriteItem,
  kWriteItemType,
  kTensorWriteData,
  // torch
  // What data.pkl is made of.
  kTorchSize,
  // A value and no function: calling one is damage.
  kTorchDtype,    // Any dtype: name() says which.
  kTorchStorage,  // FloatStorage and its kin, UntypedStorage: name() says which.
  kTorchDevice,
  kTorchLayout,    // torch.serialization._get_layout, torch.strided
  kRebuildTensor,  // _rebuild_tensor (1.x)
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,  // And _rebuild_parameter_with_state.
  kRebuildFromTypeV2,
  kRebuildOther,  // Quantised, sparse, nested, meta, wrapper subclasses: tensors that are no rows
                  // of bytes.
  kTorchOther,  // Harmless rest: torch.Tensor, torch.nn.Parameter, torch.Generator, memory formats.
  // Standard library
  // Containers and small values that every pickle may hold.
  kOrderedDict,
  kDefaultDict,
  kCounter,
  kDictLike,  // builtins.dict, types.SimpleNamespace, argparse.Namespace: a bag of names.
  kSetLike,   // builtins.set, frozenset
  // The one function that could reach others, so its arguments are checked (GetattrFault).
  kGetattr,  // builtins.getattr, for enums
  kPath,
  kBytesIo,
  kCodecsEncode,  // How protocol 2 writes bytes.
  kBuiltinType,   // builtins.int, float, str, list, tuple, bytearray, slice, range, complex
  kDatetime,
  // NumPy
  // Arrays and generators in states of objects; never tensors to us.
  kNumpyDtype,
  kNumpyReconstruct,  // numpy[._]core.multiarray._reconstruct, scalar, numpy.ndarray
  kNumpyRng,          // The state of a generator.
  // Megatron-Core, OLMo-core and other trainers: plain records without a meaning here.
  kTrainerRecord,
};

// Whether a name that is not in the table is of another package: of none of Python's own modules,
// whose functions could change what a stream made before, and not of torch's, numpy's and ours,
// whose names the table has. torch's modules and optimizers are plain classes, and count.
bool IsForeignName(std::string_view module);

// The name of an operation of the language that no checkpoint uses; empty: something else.
std::string_view UnusedOperation(unsigned char op);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CLASSES_H_
