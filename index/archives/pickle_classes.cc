// SPDX-License-Identifier: Apache-2.0
// The allow-list of pickle_classes.h: the names that a pickle may contain, and their meanings.
// Allowed are the names in the table, and every class name in the modules of kTrainerModules. Any
// other name fails the parse, unless pickle::Options::unknown accepts it.
#include "index/archives/pickle_classes.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "index/archives/pickle_record.h"

namespace tensormount::pickle {
namespace {

using enum KnownClass;

// Names of one module, separated by spaces in one text, which is split at first use. One table row
// for each name would make the source ten times as long. Names are never imported or called. Still,
// names that could have an effect (eval, exec, os, subprocess, importlib, functools) are not
// listed, so that a stream with such a name is refused.
struct Group {
  std::string_view module;
  std::string_view names;
  KnownClass known;
};

constexpr Group kGroups[] = {
    // torch 2.0 to 2.13: torch/distributed/checkpoint/{metadata,planner,filesystem}.py.
    {"torch.distributed.checkpoint.metadata", "Metadata", kMetadata},
    {"torch.distributed.checkpoint.metadata", "TensorStorageMetadata", kTensorStorageMetadata},
    {"torch.distributed.checkpoint.metadata", "ChunkStorageMetadata", kChunkStorageMetadata},
    {"torch.distributed.checkpoint.metadata", "BytesStorageMetadata", kBytesStorageMetadata},
    {"torch.distributed.checkpoint.metadata", "TensorProperties", kTensorProperties},
    {"torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING MEM_FORMAT_ENCODING",
     kMemFormatEncoding},
    {"torch.distributed.checkpoint.metadata", "MetadataIndex", kMetadataIndex},
    {"torch.distributed.checkpoint.metadata", "StorageMeta", kStorageMeta},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo", kStorageInfo},
    {"torch.distributed.checkpoint.filesystem", "SerializationFormat _StoragePrefix",
     kTrainerRecord},
    {"torch.distributed.checkpoint.planner", "SavePlan", kSavePlan},
    {"torch.distributed.checkpoint.planner", "WriteItem", kWriteItem},
    {"torch.distributed.checkpoint.planner", "WriteItemType", kWriteItemType},
    {"torch.distributed.checkpoint.planner", "TensorWriteData BytesIOWriteData", kTensorWriteData},
    {"torch.distributed.checkpoint.planner", "LoadPlan ReadItem LoadItemType", kTrainerRecord},
    {"torch.distributed.checkpoint.storage", "WriteResult", kTrainerRecord},
    {"torch.distributed.checkpoint.hf_storage", "_HFStorageInfo", kStorageInfo},
    {"torch.distributed.checkpoint._hf_utils", "_HFStorageInfo", kStorageInfo},
    // torch 1.13: the same classes below _shard.
    {"torch.distributed._shard.checkpoint.metadata", "Metadata", kMetadata},
    {"torch.distributed._shard.checkpoint.metadata", "TensorStorageMetadata",
     kTensorStorageMetadata},
    {"torch.distributed._shard.checkpoint.metadata", "ChunkStorageMetadata", kChunkStorageMetadata},
    {"torch.distributed._shard.checkpoint.metadata", "BytesStorageMetadata", kBytesStorageMetadata},
    {"torch.distributed._shard.checkpoint.metadata", "TensorProperties", kTensorProperties},
    {"torch.distributed._shard.checkpoint.metadata", "MetadataIndex", kMetadataIndex},
    {"torch.distributed._shard.checkpoint.metadata", "_MEM_FORMAT_ENCODING MEM_FORMAT_ENCODING",
     kMemFormatEncoding},
    {"torch.distributed._shard.checkpoint.filesystem", "_StorageInfo", kStorageInfo},
    {"torch.distributed._shard.checkpoint.planner", "SavePlan", kSavePlan},
    {"torch.distributed._shard.checkpoint.planner", "WriteItem", kWriteItem},
    {"torch.distributed._shard.checkpoint.planner", "WriteItemType", kWriteItemType},
    {"torch.distributed._shard.checkpoint.planner", "TensorWriteData BytesIOWriteData",
     kTensorWriteData},
    // The module of tensor properties until torch 2.2.
    {"torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", kTensorProperties},
    {"torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING _MEM_FORMAT_ENCODING",
     kMemFormatEncoding},
    {"torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata", kTrainerRecord},
    {"torch.distributed._shard.metadata", "ShardMetadata", kTrainerRecord},
    {"torch.distributed.remote_device", "_remote_device", kTrainerRecord},

    // torch itself: the names that torch._weights_only_unpickler allows, and older spellings.
    {"torch", "Size", kTorchSize},
    {"torch",
     "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool "
     "complex128 complex64 complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
     "float8_e8m0fnu float4_e2m1fn_x2 qint8 qint32 quint8 quint4x2 quint2x4 bits1x8 bits2x4 "
     "bits4x2 bits8 bits16 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 "
     "uint7 double float half long int short cdouble cfloat chalf",
     kTorchDtype},
    {"torch",
     "DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage "
     "CharStorage ByteStorage BoolStorage ComplexFloatStorage ComplexDoubleStorage QInt8Storage "
     "QInt32Storage QUInt8Storage QUInt4x2Storage QUInt2x4Storage UntypedStorage TypedStorage "
     "Storage",
     kTorchStorage},
    {"torch.cuda",
     "DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage "
     "CharStorage ByteStorage BoolStorage ComplexFloatStorage ComplexDoubleStorage UntypedStorage",
     kTorchStorage},
    {"torch.storage", "UntypedStorage TypedStorage _UntypedStorage _TypedStorage", kTorchStorage},
    {"torch.storage", "_load_from_bytes", kTorchOther},
    {"torch", "device", kTorchDevice},
    {"torch.serialization", "_get_layout", kTorchLayout},
    {"torch", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc", kTorchLayout},
    {"torch._utils", "_rebuild_tensor", kRebuildTensor},
    {"torch._utils", "_rebuild_tensor_v2", kRebuildTensorV2},
    {"torch._utils", "_rebuild_tensor_v3", kRebuildTensorV3},
    {"torch._utils", "_rebuild_parameter _rebuild_parameter_with_state", kRebuildParameter},
    {"torch._tensor", "_rebuild_from_type _rebuild_from_type_v2", kRebuildFromTypeV2},
    {"torch.tensor", "_rebuild_from_type", kRebuildFromTypeV2},
    {"torch._utils",
     "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_nested_tensor "
     "_rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass _rebuild_xla_tensor "
     "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy "
     "_rebuild_mlc_tensor",
     kRebuildOther},
    {"torch",
     "Tensor Generator contiguous_format channels_last channels_last_3d preserve_format "
     "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric "
     "per_channel_affine_float_qparams",
     kTorchOther},
    {"torch",
     "DoubleTensor FloatTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor "
     "CharTensor ByteTensor BoolTensor",
     kTorchOther},
    {"torch._tensor", "Tensor", kTorchOther},
    {"torch._C", "Generator", kTorchOther},
    {"torch._C._nn", "gelu silu", kTorchOther},
    {"torch.nn.functional", "gelu silu relu sigmoid tanh mish softplus", kTorchOther},
    {"torch.nn.parameter", "Parameter Buffer", kTorchOther},
    {"torch.nn", "Parameter", kTorchOther},
    {"torch.serialization", "_get_memory_format", kTorchOther},
    {"torch.distributed.tensor", "DTensor", kTorchOther},
    {"torch.distributed._tensor.api", "DTensor", kTorchOther},
    {"torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta ShardOrderEntry",
     kTorchOther},
    {"torch.distributed._tensor.placement_types",
     "DTensorSpec TensorMeta Shard Replicate Partial _Partial", kTorchOther},
    {"torch.distributed.tensor.placement_types", "Shard Replicate Partial _StridedShard",
     kTorchOther},
    {"torch.distributed.device_mesh", "DeviceMesh _MeshLayout", kTorchOther},
    {"torch.distributed._mesh_layout", "_MeshLayout _FlatLayout", kTorchOther},
    {"torch.optim.adam", "Adam", kTrainerRecord},
    {"torch.optim.adamw", "AdamW", kTrainerRecord},
    {"torch.optim.sgd", "SGD", kTrainerRecord},

    // Standard library, including the Python 2 module names that protocol 2 still writes.
    {"collections", "OrderedDict", kOrderedDict},
    {"collections", "defaultdict", kDefaultDict},
    {"collections", "Counter", kCounter},
    {"collections", "deque", kBuiltinType},
    {"builtins", "dict", kDictLike},
    {"__builtin__", "dict", kDictLike},
    {"types", "SimpleNamespace MappingProxyType", kDictLike},
    {"argparse", "Namespace", kDictLike},
    {"builtins", "set frozenset", kSetLike},
    {"__builtin__", "set frozenset", kSetLike},
    {"builtins", "getattr", kGetattr},
    {"__builtin__", "getattr", kGetattr},
    {"builtins",
     "int float str bytes bool list tuple bytearray slice range complex object NoneType Ellipsis",
     kBuiltinType},
    {"__builtin__",
     "int long float str unicode bytes bool list tuple bytearray slice xrange range complex object",
     kBuiltinType},
    {"pathlib", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path PurePath", kPath},
    {"pathlib._local", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path PurePath", kPath},
    {"_io", "BytesIO", kBytesIo},
    {"io", "BytesIO", kBytesIo},
    {"_codecs", "encode", kCodecsEncode},
    {"datetime", "datetime date time timedelta timezone", kDatetime},
    {"copyreg", "_reconstructor", kTrainerRecord},
    {"copy_reg", "_reconstructor", kTrainerRecord},
    {"decimal", "Decimal", kTrainerRecord},
    {"fractions", "Fraction", kTrainerRecord},
    {"uuid", "UUID SafeUUID", kTrainerRecord},
    {"re", "RegexFlag", kTrainerRecord},

    // NumPy 1 and 2.
    {"numpy", "dtype", kNumpyDtype},
    {"numpy.dtypes",
     "BoolDType Int8DType UInt8DType Int16DType UInt16DType Int32DType UInt32DType Int64DType "
     "UInt64DType LongLongDType ULongLongDType Float16DType Float32DType Float64DType "
     "LongDoubleDType Complex64DType Complex128DType ObjectDType BytesDType StrDType VoidDType "
     "DateTime64DType TimeDelta64DType",
     kNumpyDtype},
    {"numpy",
     "bool_ int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 "
     "complex128 str_ bytes_",
     kNumpyDtype},
    {"numpy", "ndarray", kNumpyReconstruct},
    {"numpy.core.multiarray", "_reconstruct scalar", kNumpyReconstruct},
    {"numpy._core.multiarray", "_reconstruct scalar", kNumpyReconstruct},
    {"numpy.core.numeric", "_frombuffer", kNumpyReconstruct},
    {"numpy._core.numeric", "_frombuffer", kNumpyReconstruct},
    {"numpy.random._pickle", "__randomstate_ctor __generator_ctor __bit_generator_ctor", kNumpyRng},
    {"numpy.random._mt19937", "MT19937", kNumpyRng},
    {"numpy.random._pcg64", "PCG64 PCG64DXSM", kNumpyRng},
    {"numpy.random._philox", "Philox", kNumpyRng},
    {"numpy.random._sfc64", "SFC64", kNumpyRng},
    {"numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence", kNumpyRng},
    {"ml_dtypes", "bfloat16 float8_e4m3fn float8_e5m2", kNumpyDtype},

    // OLMo-core >= 1.0 has its own writer; its storage infos lack torch's newer fields.
    {"olmo_core.distributed.checkpoint.filesystem", "_StorageInfo", kStorageInfo},
    {"olmo_core.distributed.checkpoint.filesystem", "_StoragePrefix", kTrainerRecord},
    {"omegaconf.dictconfig", "DictConfig", kTrainerRecord},
    {"omegaconf.listconfig", "ListConfig", kTrainerRecord},
    {"omegaconf.base", "ContainerMetadata Metadata", kTrainerRecord},
    {"omegaconf.nodes", "AnyNode", kTrainerRecord},
    {"transformer_engine.common.recipe",
     "DelayedScaling Format _FormatHelper _FormatHelperMXFP8 Float8CurrentScaling "
     "Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling QParams MMParams",
     kTrainerRecord},
};

// Modules in which every class name is allowed. Megatron-Core, Megatron-LM and OLMo-core put enums,
// configurations and plans into their checkpoints, and this library does not interpret them. The
// dot at the end limits a prefix to the modules below it.
constexpr std::string_view kTrainerModules[] = {
    "megatron.core.", "megatron.training.", "megatron.legacy.", "megatron.model.", "olmo_core.",
};

constexpr std::size_t kMaxClassNameBytes = 256;

// Whether `name` can be a class of the module itself: one word that begins with a capital letter
// after any underscores. A dotted name, of something that the module imported ("os.system"), is
// refused.
bool IsClassName(std::string_view name) {
  const std::size_t first = name.find_first_not_of('_');
  if (first == std::string_view::npos || name[first] < 'A' || name[first] > 'Z') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

bool IsModulePath(std::string_view module) {
  return std::all_of(module.begin(), module.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.';
  });
}

auto OrderOf(const ClassRow& row) { return std::tie(row.module, row.name); }

const std::vector<ClassRow>& Rows() {
  static const std::vector<ClassRow> rows = [] {
    std::vector<ClassRow> out;
    for (const Group& group : kGroups) {
      std::string_view names = group.names;
      while (!names.empty()) {
        const std::size_t end = std::min(names.find(' '), names.size());
        out.push_back({group.module, names.substr(0, end), group.known});
        names.remove_prefix(std::min(end + 1, names.size()));
      }
    }
    std::sort(out.begin(), out.end(),
              [](const ClassRow& a, const ClassRow& b) { return OrderOf(a) < OrderOf(b); });
    return out;
  }();
  return rows;
}

}  // namespace

// O(log rows). Sets `*prefix` if the name is allowed only because of its module (records of
// trainers).
const ClassRow* FindClassRow(std::string_view module, std::string_view name, KnownClass* prefix) {
  const std::vector<ClassRow>& rows = Rows();
  const ClassRow wanted{module, name, kUnknown};
  const auto at = std::lower_bound(
      rows.begin(), rows.end(), wanted,
      [](const ClassRow& a, const ClassRow& b) { return OrderOf(a) < OrderOf(b); });
  if (at != rows.end() && at->module == module && at->name == name) return &*at;
  // The limit on length bounds the work: each six bytes of a stream can use one long memoized
  // text as a name again.
  const bool short_enough =
      module.size() <= kMaxClassNameBytes && name.size() <= kMaxClassNameBytes;
  if (prefix != nullptr && short_enough && IsClassName(name) && IsModulePath(module)) {
    for (const std::string_view below : kTrainerModules) {
      if (module.starts_with(below)) *prefix = kTrainerRecord;
    }
  }
  return nullptr;
}

// The names are for messages. An opcode that neither this function nor the machine knows does not
// exist in pickletools either, and is damage.
std::string_view UnusedOperation(unsigned char op) {
  switch (op) {
    case 'i':
      return "INST";
    case 'o':
      return "OBJ";
    case 0x82:
      return "EXT1";
    case 0x83:
      return "EXT2";
    case 0x84:
      return "EXT4";
    case 'P':
      return "PERSID";
    case 0x97:
      return "NEXT_BUFFER";
    case 0x98:
      return "READONLY_BUFFER";
    case '2':
      return "DUP";
    case 'I':
      return "INT";
    case 'L':
      return "LONG";
    case 'F':
      return "FLOAT";
    case 'S':
      return "STRING";
    case 'T':
      return "BINSTRING";
    case 'U':
      return "SHORT_BINSTRING";
    case 'V':
      return "UNICODE";
    case 'd':
      return "DICT";
    case 'l':
      return "LIST";
    case 'g':
      return "GET";
    case 'p':
      return "PUT";
    default:
      return {};
  }
}

}  // namespace tensormount::pickle
