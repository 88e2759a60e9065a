// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CLASSES_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CLASSES_H_

#include <cstdint>
#include <string_view>

// The allow-list of names that a pickle may contain, and their meanings: classes and functions of
// PyTorch, trainers, NumPy and the standard library, under the module paths that releases have
// written (the table in pickle_classes.cc), and every class name in some modules of trainers
// (kTrainerModules there).

// A name that is not on the list is refused, unless pickle::Options::unknown accepts it. No name is
// ever looked up, imported or called.
namespace tensormount::pickle {

// One enumerator for each meaning. Names that moved between releases, or are used in the same way,
// share an enumerator. Names of kTrainerRecord are allowed and kept as records without an
// interpretation.
enum class KnownClass : std::uint8_t {
  kUnknown = 0,
  // torch.distributed.checkpoint
  // Classes in a .metadata file, and classes of save plans, which some releases put into .metadata.
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
  // Values in data.pkl.
  kTorchSize,
  // A dtype is a value, not a function: a stream that calls a dtype is damaged.
  kTorchDtype,  // Any dtype; Value::name() tells which.
  // FloatStorage and the other storage classes, UntypedStorage; Value::name() tells which.
  kTorchStorage,
  kTorchDevice,
  kTorchLayout,    // torch.serialization._get_layout, torch.strided
  kRebuildTensor,  // _rebuild_tensor (1.x)
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,  // Also _rebuild_parameter_with_state.
  kRebuildFromTypeV2,
  // Functions that make tensors without plain rows of bytes: quantised, sparse, nested, meta,
  // wrapper subclasses.
  kRebuildOther,
  kTorchOther,  // torch.Tensor, torch.nn.Parameter, memory formats, DTensor and others.
  // Standard library
  // Containers and small values that every pickle may hold.
  kOrderedDict,
  kDefaultDict,
  kCounter,
  kDictLike,  // builtins.dict, SimpleNamespace, MappingProxyType, argparse.Namespace.
  kSetLike,   // builtins.set, frozenset
  // getattr could reach any function, so its arguments are checked (GetattrFault).
  kGetattr,  // builtins.getattr, for enums
  kPath,
  kBytesIo,
  kCodecsEncode,  // Protocol 2 writes bytes as a call of this function.
  kBuiltinType,   // builtins.int, float, str, list, slice and others; collections.deque
  kDatetime,
  // NumPy
  // Arrays and generators in the states of objects. They are never read as tensors.
  kNumpyDtype,
  kNumpyReconstruct,  // numpy.ndarray, numpy.core.multiarray._reconstruct, scalar
  kNumpyRng,          // Classes and constructors of random number generators.
  // Names of trainers, torch and the standard library: plain records that are not interpreted.
  kTrainerRecord,
};

// Whether a name of `module` that is not in the table belongs to another package, so that
// kForeignClasses keeps it. Names of Python's own modules do not, because their functions could
// change objects that the stream made before. Names of numpy, torch and tensormount do not, because
// of these packages only the names in the table are allowed; but classes of torch.nn.modules and
// torch.optim do, because they are plain classes.
bool IsForeignName(std::string_view module);

// The name of a pickle opcode that Python knows and no checkpoint uses. Empty for all other bytes.
std::string_view UnusedOperation(unsigned char op);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CLASSES_H_
