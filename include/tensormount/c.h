// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_C_H_
#define TENSORMOUNT_C_H_

// The C interface of tensormount, for C99 and for other languages: open, list, read, save, load.
//
// Stable: functions are only added, enumerator values never change, structures only grow at their
// end. Every structure begins with `struct_size`, which the caller sets to sizeof the structure;
// members past that size count as zero, and zero always means the default. A structure larger than
// the library's is accepted if the extra bytes are zero, and is TM_UNSUPPORTED otherwise. A size
// below 4 or above 4,096 bytes, as of an uninitialised structure, is TM_INVALID_ARGUMENT.
//
// Every function that can fail returns a tm_status; tm_last_error() then gives the message. Results
// are returned through pointers, which are not written on failure (except buffers that are being
// filled, *done and *got). An object returned as `T** out` belongs to the caller, who frees it with
// the function named in the comment; every free function accepts NULL. Strings are UTF-8 and
// NUL-terminated. Pointers must not be NULL unless the comment allows it.
//
// After fork(), the child has the handles of its parent, but neither its threads nor its place
// among the ranks. Checkpoints and their files, communicators, TCP groups, savers and jobs made
// before the fork return TM_UNSUPPORTED there, with a message that names the object, and freeing
// them does nothing. The child opens and makes its own.
//
// Threads: several threads may use one checkpoint at the same time; every other object is for one
// thread at a time, unless its comment says otherwise. Several threads may use one communicator
// through different channels of it (tm_communicator_channel).
//
// Example, without ranks (examples/c_read.c is a whole program):
//
//   tm_checkpoint* checkpoint = NULL;
//   if (tm_checkpoint_open("STORE/latest", &checkpoint) != TM_OK) {
//     fprintf(stderr, "%s\n", tm_last_error());
//     return 1;
//   }
//   tm_tensor_info info = {.struct_size = sizeof(info)};
//   tm_status status = tm_checkpoint_tensor(checkpoint, "w", &info);
//   if (status == TM_OK) status = tm_checkpoint_read_bytes(checkpoint, "w", 0, bytes, 4096);
//   tm_checkpoint_close(checkpoint);

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TM_EXPORT __attribute__((visibility("default")))
#else
#define TM_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- Statuses ------------------------------------------------------------------------------

typedef int32_t tm_status;
enum {
  TM_OK = 0,
  TM_INVALID_ARGUMENT = 1,  // The caller passed something that can never work.
  TM_NOT_FOUND = 2,         // No such checkpoint, tensor or object.
  TM_ALREADY_EXISTS = 3,    // Refusing to overwrite a committed checkpoint.
  TM_PERMISSION_DENIED = 4,
  TM_READ_ONLY = 5,
  TM_RESOURCE_EXHAUSTED = 6,  // Disk, memory or quota.
  TM_DATA_LOSS = 7,           // Stored bytes are missing, short or fail their checksum.
  TM_UNAVAILABLE = 8,         // A peer, device or file system failed and may come back.
  TM_DEADLINE_EXCEEDED = 9,   // A peer did not answer in time; the message names it.
  TM_BUSY = 10,
  TM_STALE = 11,        // The checkpoint or staging directory no longer exists.
  TM_UNKNOWN = 12,      // Cannot tell whether the commit happened.
  TM_UNSUPPORTED = 13,  // Not built in, not possible here, or a newer format or structure.
  TM_CANCELLED = 14,
  TM_INTERNAL = 15  // A bug in tensormount.
};

// Name of a status: "NOT_FOUND"; "UNKNOWN_STATUS" for other numbers.
TM_EXPORT const char* tm_status_name(tm_status status);
// Message of the last failed call on this thread; "" if none failed. Valid until the next failure.
TM_EXPORT const char* tm_last_error(void);
// The errno of the last failed call on this thread: that of the failed system call, or the errno
// that stands for the status.
TM_EXPORT int tm_last_errno(void);
// The last failure as a JSON object, for programs: "code" ("NOT_FOUND"), "status" (its number),
// "errno" and "message"; and, if known, "rank" (the rank that failed or did not come), "key" (of a
// tensor, an object or a common value), "box" ({"begin": [], "extent": []}, in the tensor "key"),
// "file" (of a checkpoint, or a path), "cause" (the likely cause, as text), "memory_in_use" (true:
// a device may still access memory of the call that failed, so the process must never reuse that
// memory) and "device" ("cuda:0 (...)", the device that failed; with "UNAVAILABLE" the rank is
// alive and its device is lost). Later versions may add fields. Freed with tm_free. TM_NOT_FOUND if
// no call failed. Does not change the last error.
TM_EXPORT tm_status tm_last_error_json(char** json);
// Sets the last error and errno, for libraries built on this one, and returns `status`.
// `error_number` 0: the errno that stands for the status. Clears the other fields. Does nothing for
// TM_OK.
TM_EXPORT tm_status tm_set_last_error(tm_status status, int error_number, const char* message);

// The version of the library: "0.1.0".
TM_EXPORT const char* tm_version(void);

// ---- Logging -------------------------------------------------------------------------------

// The library logs little (tensormount/log.h), to standard error unless a sink is set. Level and
// sink are process-wide.
typedef int32_t tm_log_level;
enum { TM_LOG_DEBUG = 0, TM_LOG_INFO = 1, TM_LOG_WARNING = 2, TM_LOG_ERROR = 3 };
// Drops log lines below `level`. The level at the start is TM_LOG_WARNING.
TM_EXPORT tm_status tm_set_log_level(tm_log_level level);
// `line` is NUL-terminated and has no line end. It may contain control characters, because names in
// it come from outside. Called on any thread, one call at a time; must not wait for calls of the
// library.
typedef void (*tm_log_sink)(void* context, tm_log_level level, const char* line);
// Sets the function that receives log lines; NULL restores standard error. After the return the
// former sink is not running and is not called again. Must not be called from a sink.
TM_EXPORT tm_status tm_set_log_sink(tm_log_sink sink, void* context);

// Allows the library to read files through mmap, the fastest way to read short runs. A SIGBUS that
// a page raises inside a library function becomes that function's error; every other SIGBUS goes to
// the previous handler. Call it once per process, after the program has set its own handlers; see
// tensormount/mapping_guard.h. TM_UNSUPPORTED if the system refuses, or if our handler was
// replaced.
TM_EXPORT tm_status tm_enable_mapping_guard(void);

// ---- Memory that is handed out -------------------------------------------------------------

// Frees memory returned through char** or void**.
TM_EXPORT void tm_free(void* memory);

// A list of strings, freed with tm_list_free.
typedef struct tm_list tm_list;
TM_EXPORT size_t tm_list_size(const tm_list* list);
// String `index`; NULL if `index` is out of range. `length` (may be NULL) receives its length
// without the NUL.
TM_EXPORT const char* tm_list_get(const tm_list* list, size_t index, size_t* length);
TM_EXPORT void tm_list_free(tm_list* list);

// ---- Element types, regions, buffers -------------------------------------------------------

enum {
  TM_MAX_RANK = 16  // Largest number of axes of a tensor.
};

// Element types; the numbers are those on disk.
enum {
  TM_BOOL = 1,
  TM_I8 = 2,
  TM_U8 = 3,
  TM_I16 = 4,
  TM_U16 = 5,
  TM_I32 = 6,
  TM_U32 = 7,
  TM_I64 = 8,
  TM_U64 = 9,
  TM_F16 = 10,
  TM_BF16 = 11,
  TM_F32 = 12,
  TM_F64 = 13,
  TM_F8E4M3 = 14,
  TM_F8E5M2 = 15,
  TM_F8E8M0 = 16,
  TM_F8E4M3FNUZ = 17,
  TM_F8E5M2FNUZ = 18,
  TM_F6E2M3 = 19,  // 6 bits an element.
  TM_F6E3M2 = 20,
  TM_F4 = 21,  // 4 bits an element.
  TM_C64 = 22,
  TM_C128 = 23
};
// Name of an element type, such as "bf16"; NULL for unknown numbers.
TM_EXPORT const char* tm_dtype_name(uint32_t dtype);
// Bits of one element; 0 for unknown numbers.
TM_EXPORT uint32_t tm_dtype_bits(uint32_t dtype);
// Accepts the names of tensormount ("bf16"), safetensors ("BF16"), torch and NumPy. TM_UNSUPPORTED
// for other names.
TM_EXPORT tm_status tm_dtype_from_name(const char* name, uint32_t* dtype);

// Elements of a tensor: a box, or elements [flat_first, flat_first + flat_count) of the row-major
// order of that box. A NULL region means the whole tensor, where NULL is allowed.
typedef struct tm_region {
  uint32_t struct_size;
  int32_t rank;           // Number of axes.
  const int64_t* begin;   // NULL: zeros.
  const int64_t* extent;  // NULL only where rank is 0.
  int32_t is_flat;        // 1: the flat range; 0: the box.
  int32_t reserved;
  int64_t flat_first;
  int64_t flat_count;
} tm_region;

enum { TM_DEVICE_HOST = 0, TM_DEVICE_CUDA = 1 };
// Kind of memory. On a device TM_MEMORY_PAGEABLE means "not specified" and counts as
// TM_MEMORY_DEVICE.
enum { TM_MEMORY_PAGEABLE = 0, TM_MEMORY_PINNED = 1, TM_MEMORY_MANAGED = 2, TM_MEMORY_DEVICE = 3 };
// The stream whose work, as submitted so far, must finish before the contents are valid.
// TM_STREAM_NONE: the contents are valid now.
enum {
  TM_STREAM_NONE = 0,  // A non-NULL `stream` then counts as a handle, as in older headers.
  TM_STREAM_LEGACY_DEFAULT = 1,
  TM_STREAM_PER_THREAD_DEFAULT = 2,
  TM_STREAM_HANDLE = 3
};

// Memory that the caller owns, described as DLPack describes it.
typedef struct tm_buffer {
  uint32_t struct_size;
  uint32_t dtype;
  int32_t device_kind;
  int32_t device_ordinal;
  void* data;
  const int64_t* shape;    // In elements; one number an axis.
  const int64_t* strides;  // In elements, may be negative; NULL: packed, row-major.
  int32_t rank;            // Number of axes; 1 for a flat range.
  int32_t reserved;
  void* stream;  // A cudaStream_t, with TM_STREAM_HANDLE; else NULL.
  int32_t memory_kind;
  int32_t stream_kind;
  uint8_t device_uuid[16];  // Identifies the device whatever its ordinal; zeros: not specified.
} tm_buffer;

// ---- Reading without ranks -----------------------------------------------------------------

// An open checkpoint. It stays readable even if the checkpoint is removed or replaced meanwhile.
typedef struct tm_checkpoint tm_checkpoint;

// Opens a checkpoint for reading. `path`: a checkpoint ("STORE/step-1000"), "STORE/latest" or
// "STORE" (its latest checkpoint), or a checkpoint in a foreign format (docs/formats-adopted.md).
// Freed with tm_checkpoint_close. TM_NOT_FOUND, TM_DATA_LOSS, TM_UNSUPPORTED (a newer or unknown
// format), TM_PERMISSION_DENIED (data outside the checkpoint that no root covers).
TM_EXPORT tm_status tm_checkpoint_open(const char* path, tm_checkpoint** out);
typedef struct tm_open_options {
  uint32_t struct_size;
  int32_t reserved;
  // Trusted directories: data of adopted checkpoints may lie below them, and links of foreign
  // checkpoints may lead into them.
  const char* const* roots;
  size_t root_count;
  // The file or index to read in a foreign directory that holds several sets of weights. May be
  // NULL.
  const char* file;
  // A name map, which is JSON: the checkpoint has the keys that it gives. Rules (docs/mapping.md),
  // or an object with "rules" as an object, "as", "from", "numbers", "config"
  // (tensormount/name_map.h). NULL: none.
  const char* name_map;
} tm_open_options;
// Like tm_checkpoint_open, with options. `options` may be NULL.
TM_EXPORT tm_status tm_checkpoint_open_with(const char* path, const tm_open_options* options,
                                            tm_checkpoint** out);
TM_EXPORT void tm_checkpoint_close(tm_checkpoint* checkpoint);

// The resolved path, with links and "latest" followed; and the UUID (32 hex digits), "" for foreign
// formats. Both are valid until the checkpoint is closed.
TM_EXPORT const char* tm_checkpoint_path(const tm_checkpoint* checkpoint);
TM_EXPORT const char* tm_checkpoint_uuid(const tm_checkpoint* checkpoint);

// Lists of the keys of tensors, of the keys of objects, and of warnings: problems that did not
// prevent opening or later reads, and which checkpoint of a store was opened. Freed with
// tm_list_free.
TM_EXPORT tm_status tm_checkpoint_keys(const tm_checkpoint* checkpoint, tm_list** out);
TM_EXPORT tm_status tm_checkpoint_objects(const tm_checkpoint* checkpoint, tm_list** out);
TM_EXPORT tm_status tm_checkpoint_warnings(const tm_checkpoint* checkpoint, tm_list** out);

// A tensor's properties. Only the first `rank` numbers of `shape` are valid.
typedef struct tm_tensor_info {
  uint32_t struct_size;  // Set before the call.
  uint32_t dtype;
  int32_t rank;
  int32_t has_digest;  // 1: `digest` is valid. 0 for foreign formats and for layers.
  uint64_t bytes;
  uint64_t digest;  // CRC-64/NVME of the row-major bytes.
  int64_t shape[TM_MAX_RANK];
} tm_tensor_info;
// The properties of tensor `key`. TM_NOT_FOUND: no such tensor.
TM_EXPORT tm_status tm_checkpoint_tensor(const tm_checkpoint* checkpoint, const char* key,
                                         tm_tensor_info* info);

// Counts of the values of a tensor, taken when it was saved. A complex element counts as two
// values.
typedef struct tm_value_statistics {
  uint32_t struct_size;  // Set before the call.
  int32_t known;         // 0: the counts are not known, and all other members are 0.
  uint64_t count;        // Number of values.
  uint64_t zeros;        // Of both signs.
  uint64_t nan;
  uint64_t posinf;
  uint64_t neginf;
  double absmax;       // Largest magnitude of the finite values.
  int32_t has_absmax;  // 0: no value is finite.
  int32_t reserved;
} tm_value_statistics;
// TM_NOT_FOUND: no such tensor. TM_DATA_LOSS: the counts are damaged.
TM_EXPORT tm_status tm_checkpoint_statistics(const tm_checkpoint* checkpoint, const char* key,
                                             tm_value_statistics* out);

// Reads a region of a tensor (NULL: all of it) into `out`, whatever sharding it was saved with;
// `out` may be strided. Every byte is checked if the checkpoint has checksums.
//   TM_NOT_FOUND         no such tensor
//   TM_INVALID_ARGUMENT  region, dtype or shape do not fit
//   TM_DATA_LOSS         stored bytes are missing or damaged; what `out` holds is undefined
// A read uses one thread for each 4 MiB, or for each 1,024 short runs; at most one per core, and at
// most 8. These threads have ended when the call returns.
TM_EXPORT tm_status tm_checkpoint_read(const tm_checkpoint* checkpoint, const char* key,
                                       const tm_region* region, const tm_buffer* out);
// Reads bytes [offset, offset + size) of the row-major byte string of a tensor.
// Elements are little-endian. A range that reaches past the end is TM_INVALID_ARGUMENT.
TM_EXPORT tm_status tm_checkpoint_read_bytes(const tm_checkpoint* checkpoint, const char* key,
                                             uint64_t offset, void* out, size_t size);

// Maps bytes [offset, offset + size) of a tensor without a copy; they must be one contiguous run of
// one file. The bytes are not verified. They stay valid, and the checkpoint stays open, until
// tm_mapping_free; if another program truncates the file meanwhile, accessing them raises SIGBUS.
// TM_UNSUPPORTED: the bytes are not one run, or cannot be mapped; read them instead. For an empty
// range tm_mapping_data returns NULL.
typedef struct tm_mapping tm_mapping;
TM_EXPORT tm_status tm_checkpoint_map(const tm_checkpoint* checkpoint, const char* key,
                                      uint64_t offset, uint64_t size, tm_mapping** out);
TM_EXPORT const void* tm_mapping_data(const tm_mapping* mapping);
TM_EXPORT void tm_mapping_free(tm_mapping* mapping);

// The chunks of a tensor as JSON: boxes, files, offsets, lengths, hashes and the ranks that wrote
// them, with the fields of `tensormount layout --json` (docs/cli.md). Freed with tm_free.
TM_EXPORT tm_status tm_checkpoint_layout(const tm_checkpoint* checkpoint, const char* key,
                                         char** json);
// The chunks of a tensor as a diagram: a complete SVG file without scripts or references. Freed
// with tm_free.
TM_EXPORT tm_status tm_checkpoint_picture(const tm_checkpoint* checkpoint, const char* key,
                                          char** svg);

// The grid that an object was saved on. Writes the grid's extents to `grid`, which has room for
// TM_MAX_RANK, and their number to *rank: 0 for an object without a grid. TM_NOT_FOUND: no such
// object.
TM_EXPORT tm_status tm_checkpoint_object_grid(const tm_checkpoint* checkpoint, const char* key,
                                              int64_t* grid, int32_t* rank);
// The bytes of an object, or of its part `index` (`rank` numbers; 0 for objects without a grid).
// Freed with tm_free. TM_NOT_FOUND: no such object, or no such part.
TM_EXPORT tm_status tm_checkpoint_object(const tm_checkpoint* checkpoint, const char* key,
                                         const int64_t* index, int32_t rank, void** data,
                                         size_t* size);

// The common value `name` as JSON (the form of common.json, docs/format.md); `name` NULL: all
// common values as one object. Freed with tm_free; `size` may be NULL. TM_NOT_FOUND: no such value.
TM_EXPORT tm_status tm_checkpoint_common(const tm_checkpoint* checkpoint, const char* name,
                                         char** json, size_t* size);
// Like tm_checkpoint_common, for the values that rank `rank` of the save set for itself.
TM_EXPORT tm_status tm_checkpoint_rank_common(const tm_checkpoint* checkpoint, int32_t rank,
                                              const char* name, char** json, size_t* size);
// Metadata that the application stored about the whole checkpoint, as a JSON object; empty if none
// was set. Freed with tm_free; `size` may be NULL.
TM_EXPORT tm_status tm_checkpoint_metadata(const tm_checkpoint* checkpoint, char** json,
                                           size_t* size);

// ---- Communicators -------------------------------------------------------------------------

// How the ranks of a job reach each other. Every rank of the communicator must make the same
// collective calls in the same order. A rank that does not come is reported after a timeout, and
// the call fails on the other ranks. An invalid argument on one rank, except the communicator
// itself, fails the call on all ranks.
typedef struct tm_communicator tm_communicator;
TM_EXPORT void tm_communicator_free(tm_communicator* communicator);
TM_EXPORT int32_t tm_communicator_rank(const tm_communicator* communicator);
TM_EXPORT int32_t tm_communicator_size(const tm_communicator* communicator);

// A communicator with one rank, this process.
TM_EXPORT tm_status tm_communicator_self(tm_communicator** out);

// Wraps the host program's own process group. The host guarantees:
//   Order    Messages from one rank to another match the receives for them in the order in which
//            both were started. A receive always has exactly the size of its message.
//   Tag      Nothing else uses `tag` between these ranks while the communicator lives.
//   Sizes    1 byte to TM_MAX_CALLBACK_MESSAGE. A message to the rank itself never occurs.
//   Requests At most one receive and 9 sends per other rank are in progress at a time. A send may
//            block on its receive for any length of time.
//   Progress `send` and `receive` only start a request, `test` only checks it: none of them waits
//            for another rank.
//   Memory   `data` stays valid until `test` reports its request done or failed, or `cancel`
//            returns. It belongs to the communicator, never to the caller.
//   Threads  Calls come from several threads (the caller's, and one that sends heartbeats while a
//            save or load is in progress), but never two at a time. The callbacks must not call the
//            communicator.
//   Failure  A failed request means that the peer is gone; it is not retried.
enum { TM_MAX_CALLBACK_MESSAGE = 1 << 20 };
typedef struct tm_callbacks {
  uint32_t struct_size;
  uint32_t tag;   // Tag of all messages.
  void* context;  // Passed to each call.
  // Start a request. Return 0 and store the host's number of the request in *request, or return
  // another number on failure.
  int (*send)(void* context, int32_t to, uint32_t tag, const void* data, uint64_t size,
              uint64_t* request);
  int (*receive)(void* context, int32_t from, uint32_t tag, void* data, uint64_t size,
                 uint64_t* request);
  // Returns 0 while the request is in progress, 1 when it is done, a negative number if it failed.
  // After 1 or a failure the request is not used again.
  int (*test)(void* context, uint64_t request);
  // May be NULL. Ends a request, whose `data` must not be accessed afterwards. Called only for
  // requests that are in progress when the communicator is freed; if `cancel` is NULL, their memory
  // leaks.
  void (*cancel)(void* context, uint64_t request);
  // How long, in milliseconds, freeing the communicator waits until the other ranks free theirs. 0
  // means 5,000. The callbacks must work until then.
  int64_t leave_wait_ms;
} tm_callbacks;
// Makes a communicator from callbacks. Sends nothing before the first use. `callbacks` is copied.
// Free the communicator before the objects that the callbacks use.
TM_EXPORT tm_status tm_communicator_from_callbacks(const tm_callbacks* callbacks, int32_t rank,
                                                   int32_t size, tm_communicator** out);

// Makes channel `channel` (1 to 7): a communicator of the same ranks, for work that runs
// concurrently with the work of `parent`. Every rank makes the same channels; `parent` must outlive
// them.
TM_EXPORT tm_status tm_communicator_channel(tm_communicator* parent, uint32_t channel,
                                            tm_communicator** out);
// Makes a communicator of some ranks of `parent`, in which rank i is ranks[i] of `parent`. Only
// these ranks call this function. Subgroups that share ranks need different channels (1 to 7).
// `parent` must outlive the subgroup.
TM_EXPORT tm_status tm_communicator_subgroup(tm_communicator* parent, const int32_t* ranks,
                                             size_t count, uint32_t channel, tm_communicator** out);

// A group of ranks that communicate over TCP, and over Unix sockets within a machine; see
// docs/tcp.md. Each rank listens, the host program distributes the addresses (through torch's
// key-value store or a file), and each rank connects. Neither tm_tcp_listen nor tm_tcp_connect
// waits for another rank.
typedef struct tm_tcp tm_tcp;
enum { TM_TCP_TOKEN_BYTES = 32 };
typedef struct tm_tcp_options {
  uint32_t struct_size;
  uint32_t no_unix_sockets;    // 1: TCP also between ranks of one machine.
  const char* interface_name;  // As TcpOptions::interface (tensormount/tcp_group.h); may be NULL.
  // A numeric address of this machine, instead of an interface; may be NULL.
  const char* address;
  uint32_t first_port;  // Port range to listen on; 0 and 0: any port.
  uint32_t last_port;
  int64_t connect_timeout_ms;  // How long connecting to an unreachable peer is retried. 0: 30,000.
  // A machine that stops answering counts as dead after about twice this time. 0 means 30,000; a
  // negative value means never.
  int64_t keep_alive_ms;
  // How long freeing the communicator waits for sent data to be delivered. 0 means 5,000.
  int64_t leave_wait_ms;
} tm_tcp_options;
// Opens the sockets on which this rank listens. `options` may be NULL. TM_NOT_FOUND: no such
// interface, or it is down or has no usable address; or the machine has no interface at all.
TM_EXPORT tm_status tm_tcp_listen(const tm_tcp_options* options, tm_tcp** out);
// The address of this rank: printable ASCII without blanks, at most 512 characters. Not secret.
// Valid until tm_tcp_free. NULL for NULL.
TM_EXPORT const char* tm_tcp_address(const tm_tcp* tcp);
// Makes a random token. Rank 0 makes one and the host program sends it to the other ranks only:
// every process that has the token can join the group. `size` must be TM_TCP_TOKEN_BYTES.
TM_EXPORT tm_status tm_tcp_token(uint8_t* token, size_t size);
// Makes this rank's communicator. Call it once per tm_tcp, which may be freed afterwards.
// `addresses`: the addresses of all `size` ranks in rank order, equal on all ranks.
// TM_INVALID_ARGUMENT names the rank whose address is invalid.
TM_EXPORT tm_status tm_tcp_connect(tm_tcp* tcp, const char* const* addresses, int32_t rank,
                                   int32_t size, const uint8_t* token, size_t token_size,
                                   tm_communicator** out);
TM_EXPORT void tm_tcp_free(tm_tcp* tcp);

// The processes of an MPI job; the functions are in libtensormount_mpi. tm_mpi_init initialises MPI
// if the program has not; in this case tm_mpi_free finalises MPI, unless tm_mpi_abandon was called
// (after a failure, finalising would wait for dead ranks), messages are unfinished or ranks do not
// come. TM_UNSUPPORTED without MPI. Free the communicators before the tm_mpi.
typedef struct tm_mpi tm_mpi;
TM_EXPORT tm_status tm_mpi_init(tm_mpi** out);
TM_EXPORT tm_status tm_mpi_world(tm_mpi* mpi, tm_communicator** out);
TM_EXPORT void tm_mpi_abandon(tm_mpi* mpi);
TM_EXPORT void tm_mpi_free(tm_mpi* mpi);

// ---- One rank's part of a checkpoint -------------------------------------------------------

// The tensors, objects and values that this rank saves, or wants to load.
typedef struct tm_state tm_state;
TM_EXPORT tm_status tm_state_new(tm_state** out);
TM_EXPORT void tm_state_free(tm_state* state);

// Label of a shard that several ranks hold: exactly one of the labelled replicas must be the main
// one.
enum { TM_REPLICA_UNLABELLED = 0, TM_REPLICA_MAIN = 1, TM_REPLICA_COPY = 2 };

// A part of a global tensor that this rank holds or wants. The structures that a tm_shard points to
// are read during the call only; the memory that `data` describes is used until the save or load
// has ended.
typedef struct tm_shard {
  uint32_t struct_size;
  int32_t replica;
  const int64_t* global_shape;
  int32_t global_rank;      // Number of axes of the whole tensor.
  int32_t metadata_only;    // 1: `data` has no memory; for tm_validate and tm_dump_spec.
  const tm_region* region;  // NULL: the whole tensor.
  // The memory of the region. It belongs to the caller, and must stay valid until the save or load
  // has ended.
  const tm_buffer* data;
} tm_shard;
// Adds a shard. Several shards of one key may be added. An argument error is returned here and also
// fails the later save or load on all ranks.
TM_EXPORT tm_status tm_state_add_tensor(tm_state* state, const char* key, const tm_shard* shard);

// Adds many shards in one call, for callers with a high cost per call (9 us per tensor from
// Python). `keys`: `count` NUL-terminated strings, `keys_size` bytes in all. `words`: `word_count`
// numbers, for each shard in turn
//   dtype, flags, replica, axes of the global tensor, address of the data
//   shape of the global tensor, begin of the box, extent of the box: one number per axis each
//   flat_first, flat_count                with TM_WORDS_FLAT: that range of the box
//   strides of the data, in elements      with TM_WORDS_STRIDED: one number per axis of the box,
//                                         or one for a flat range
//   device_kind, device_ordinal, device_uuid (two numbers, its bytes in order), memory_kind,
//   stream_kind, stream                   with TM_WORDS_MEMORY: as in tm_buffer
// The data have the shape of the region, as in tm_shard. The arrays are not used after the call.
enum {
  TM_WORDS_STRIDED = 1,
  TM_WORDS_FLAT = 2,
  TM_WORDS_METADATA_ONLY = 4,  // No memory; the address is ignored.
  TM_WORDS_MEMORY = 8
};
TM_EXPORT tm_status tm_state_add_tensors(tm_state* state, const char* keys, size_t keys_size,
                                         const int64_t* words, size_t word_count, size_t count);

// The `words` of tm_state_add_tensors, parsed and checked once, for states that are rebuilt for
// every save with other data addresses. Immutable; several threads may use one layout.
typedef struct tm_layout tm_layout;
TM_EXPORT tm_status tm_layout_new(const char* keys, size_t keys_size, const int64_t* words,
                                  size_t word_count, size_t count, tm_layout** out);
TM_EXPORT void tm_layout_free(tm_layout* layout);
// Adds all shards of the layout. `addresses`: one data address per shard, `count` of them; NULL:
// the addresses in the words.
TM_EXPORT tm_status tm_state_add_layout(tm_state* state, const tm_layout* layout,
                                        void* const* addresses, size_t count);

// Adds an object, whose bytes are copied. Without a grid (`rank` 0) the object must be equal on all
// ranks that add it. With a grid, `data` has the bytes of part `index` of `grid`; `index` and
// `grid` have `rank` numbers each.
TM_EXPORT tm_status tm_state_add_object(tm_state* state, const char* key, const void* data,
                                        size_t size, const int64_t* index, const int64_t* grid,
                                        int32_t rank);
// For loading: requests an object, which the load report then returns. `grid` NULL: any grid.
TM_EXPORT tm_status tm_state_want_object(tm_state* state, const char* key, const int64_t* index,
                                         const int64_t* grid, int32_t rank);

// These functions set values as JSON (the form of common.json): set_common a value that is equal on
// all ranks that set it, set_rank_common a value of this rank, set_metadata a JSON object about the
// whole checkpoint, set_local a value that is not stored (the load report returns it).
TM_EXPORT tm_status tm_state_set_common(tm_state* state, const char* name, const char* json);
TM_EXPORT tm_status tm_state_set_rank_common(tm_state* state, const char* name, const char* json);
TM_EXPORT tm_status tm_state_set_metadata(tm_state* state, const char* json);
TM_EXPORT tm_status tm_state_set_local(tm_state* state, const char* name, const char* json);

// Makes tensor `key` also readable layer by layer: `pattern` has one "{}" for the layer number.
TM_EXPORT tm_status tm_state_name_layers(tm_state* state, const char* key, const char* pattern);

// Reports an error that the caller found: the save or load then fails on all ranks, instead of
// waiting for this rank. Returns TM_OK if the error was recorded.
TM_EXPORT tm_status tm_state_fail(tm_state* state, tm_status status, const char* message);
// Like tm_state_fail, with the fields of the failure ("key", "device", ...) in the form of
// tm_last_error_json, which all ranks then get. "status" and "message" are required; "code" and
// unknown fields are ignored.
TM_EXPORT tm_status tm_state_fail_json(tm_state* state, const char* json);

// ---- Events, waiting -----------------------------------------------------------------------

enum { TM_EVENT_START = 0, TM_EVENT_END = 1, TM_EVENT_ERROR = 2 };
// One step of a save or load on this rank. Each phase has a start event, then an end or an error.
typedef struct tm_event {
  uint32_t struct_size;  // Set by the library.
  int32_t kind;
  const char* job;    // "save", "load".
  const char* path;   // "STORE/NAME"
  const char* phase;  // "validate", "plan", "write", ...
  int32_t rank;
  tm_status status;  // The error, with TM_EVENT_ERROR.
  const char* message;
  uint64_t bytes;  // Bytes that this rank moved in the phase; with TM_EVENT_END.
  double seconds;  // Duration of the phase; with TM_EVENT_END and TM_EVENT_ERROR.
} tm_event;
// Called on the thread that does the work; must return soon. `event` is valid during the call only.
typedef void (*tm_event_hook)(void* context, const tm_event* event);

// ---- Saving --------------------------------------------------------------------------------

enum {
  TM_PLACE_AUTO = 0,
  TM_PLACE_TENSOR_FILE = 1,
  TM_PLACE_RANK_SHARD = 2,
  TM_PLACE_SAFETENSORS = 3
};
enum { TM_REPLICAS_ROTATING = 0, TM_REPLICAS_FULL = 1, TM_REPLICAS_OFF = 2, TM_REPLICAS_WARN = 3 };
enum { TM_SAVE_PARALLEL = 0, TM_SAVE_MAIN = 1 };
enum { TM_COMMON_ERROR = 0, TM_COMMON_WARN = 1, TM_COMMON_OFF = 2 };
enum { TM_NONFINITE_ALLOW = 0, TM_NONFINITE_WARN = 1, TM_NONFINITE_REFUSE = 2 };

typedef struct tm_save_report tm_save_report;
// Hooks of a save. `report` is valid during the call only.
typedef tm_status (*tm_before_publish_hook)(void* context, const tm_save_report* report);
typedef void (*tm_on_commit_hook)(void* context, const tm_save_report* report);

// Options of a save, described in tensormount/save.h. All except the hooks must be equal on every
// rank.
typedef struct tm_save_options {
  uint32_t struct_size;
  int32_t placement;
  int32_t replica_check;
  int32_t replace;  // 1: an existing checkpoint is replaced at commit.
  int32_t strategy;
  int32_t common_check;
  int32_t skip_validation;  // 1: ranks do not check beforehand that they cover every tensor.
  int32_t no_plan_reuse;
  const char* const* common_exempt;  // Globs of common values that may differ.
  size_t common_exempt_count;
  const char* producer;    // NULL: "tensormount <version>".
  int64_t liveness_ms;     // 0 means 30,000. See Timeouts in tensormount/communicator.h.
  int64_t arrival_ms;      // 0 means 1,800,000.
  tm_event_hook on_event;  // May be NULL.
  void* on_event_context;
  int64_t total_ms;     // Limit for the whole call; 0: none.
  int32_t page_hashes;  // 1: also hash every 4 KiB, for reads of a few rows (tensormount/save.h).
  int32_t reserved;
  // Called on the saving thread when the data of this rank are durable and nothing is published
  // yet, with the report so far. A status other than TM_OK fails the save on all ranks, with the
  // message from tm_set_last_error. It may take long, because heartbeats continue. May be NULL,
  // like on_commit.
  tm_before_publish_hook before_publish;
  void* before_publish_context;
  // Called after the commit, before the save ends.
  tm_on_commit_hook on_commit;
  void* on_commit_context;
  // Reuse of earlier checkpoints (tensormount/save.h). The base is a checkpoint of the same store.
  int32_t no_reuse;    // 1: write everything, even what the base holds.
  int32_t full_every;  // Every n-th save in a row writes everything; 0: every 50th; negative: none.
  const char* reuse_from;  // Name of the base; NULL: the latest checkpoint.
  // Name of the base from which tensors, objects and values that no rank has are taken; NULL: none.
  const char* inherit;
  // Retention rules as in tm_store_prune. Rank 0 applies them after the commit; NULL: none.
  const char* retention;
  int32_t ephemeral;  // 1: temporary; the next committed save removes it, unless it is pinned.
  int32_t writers;    // Threads that write this rank's data; 0: by cores and ranks, at most 8.
  // Values of tensors (tensormount/save.h). no_statistics 1: do not count them.
  int32_t no_statistics;
  int32_t nonfinite;                    // TM_NONFINITE_...
  const char* const* nonfinite_exempt;  // Globs of keys that may hold NaNs and infinities.
  size_t nonfinite_exempt_count;
  // For saves to "s3://...": the directory that all ranks save to before rank 0 copies into the
  // bucket; NULL: the environment variable TENSORMOUNT_STAGING.
  const char* staging;
} tm_save_options;

TM_EXPORT void tm_save_report_free(tm_save_report* report);

// Collective: every rank passes its part and the same path "STORE/NAME" and options, and every rank
// gets the same result. `options` and `report` may be NULL.
//   TM_OK                  committed and durable
//   TM_INVALID_ARGUMENT    the shards do not cover a tensor exactly, dtype, shape or options differ
//                          between ranks, or a tensor has NaNs (TM_NONFINITE_REFUSE)
//   TM_ALREADY_EXISTS      the name is taken
//   TM_PERMISSION_DENIED   the checkpoint to replace is pinned, or the store cannot be written
//   TM_NOT_FOUND           no checkpoint has the name `reuse_from` or `inherit`
//   TM_DATA_LOSS           replicas differ
//   TM_RESOURCE_EXHAUSTED  disk full, on some rank
//   TM_DEADLINE_EXCEEDED, TM_UNAVAILABLE  a rank died or did not come; the message names it
//   TM_UNKNOWN             cannot tell whether the save was committed
TM_EXPORT tm_status tm_save(const tm_state* state, const char* path, tm_communicator* communicator,
                            const tm_save_options* options, tm_save_report** report);

// The whole report as one line of JSON, freed with tm_free: "path", "uuid", "base", "note", the
// members of tm_save_numbers ("plan_reused" as a boolean), "files", "warnings", "pruned" and
// "not_pruned". Later versions may add members, which get no accessor below. Bytes that are not
// UTF-8 are replaced. A failed save has no report.
TM_EXPORT tm_status tm_save_report_json(const tm_save_report* report, char** json);

// The numbers of a report; times are in seconds.
typedef struct tm_save_numbers {
  uint32_t struct_size;  // Set before the call.
  int32_t plan_reused;
  uint64_t generation;
  uint64_t tensors;
  uint64_t bytes;               // Size of all tensors.
  uint64_t bytes_written;       // By all ranks.
  uint64_t bytes_written_here;  // By this rank.
  uint64_t replica_bytes;
  uint64_t replica_bytes_compared;
  double validate_seconds;  // All times below are of this rank.
  double plan_seconds;
  double write_seconds;
  double compare_seconds;
  double publish_seconds;
  // Data that were not written because the base holds them. Counts are of all ranks.
  double reuse_seconds;  // Time of this rank.
  uint64_t reused_tensors;
  uint64_t reused_objects;
  uint64_t reused_bytes;                // Stored size of the reused data.
  uint64_t reused_bytes_by_leaf;        // Part of reused_bytes proved equal by hashes.
  uint64_t reused_bytes_by_comparison;  // Part of reused_bytes proved equal by comparison.
  uint64_t files_linked;
  uint64_t bytes_linked;
  uint64_t files_copied;  // Copied because a link was refused.
  uint64_t bytes_copied;
} tm_save_numbers;
TM_EXPORT tm_status tm_save_report_numbers(const tm_save_report* report, tm_save_numbers* out);
// Both strings are valid as long as the report.
TM_EXPORT const char* tm_save_report_path(const tm_save_report* report);
TM_EXPORT const char* tm_save_report_uuid(const tm_save_report* report);
// The name of the base; and a note why nothing was reused or why links were refused. Both are "" if
// not applicable.
TM_EXPORT const char* tm_save_report_base(const tm_save_report* report);
TM_EXPORT const char* tm_save_report_note(const tm_save_report* report);
// Data files that this rank wrote, wholly or in part ("data/..."); and warnings.
TM_EXPORT tm_status tm_save_report_files(const tm_save_report* report, tm_list** out);
TM_EXPORT tm_status tm_save_report_warnings(const tm_save_report* report, tm_list** out);
// Rank 0 only: checkpoints removed by the retention rules or because they are ephemeral; and what
// failed (SaveReport::not_pruned), with the reason.
TM_EXPORT tm_status tm_save_report_pruned(const tm_save_report* report, tm_list** out);
TM_EXPORT tm_status tm_save_report_not_pruned(const tm_save_report* report, tm_list** out);

// Saves in the background with the communicator's own saver, whose staging memory is reused.
// Returns when the data are staged (copied), without waiting for other ranks unless two saves are
// in progress. After the return `state` may be freed. Freeing the job or the communicator waits for
// the save; the job keeps its result. The contexts of the hooks must stay valid until the save has
// ended.
typedef struct tm_save_job tm_save_job;
TM_EXPORT tm_status tm_save_async(const tm_state* state, const char* path,
                                  tm_communicator* communicator, const tm_save_options* options,
                                  tm_save_job** out);
// Like tm_save_async, but without a copy, for callers that wait for the result anyway. The buffers
// that `state` describes must stay unchanged until the save has ended.
TM_EXPORT tm_status tm_save_in_place(const tm_state* state, const char* path,
                                     tm_communicator* communicator, const tm_save_options* options,
                                     tm_save_job** out);

// A saver with its own staging memory and channels; see AsyncOptions in tensormount/async_save.h.
typedef struct tm_saver tm_saver;
typedef struct tm_saver_options {
  uint32_t struct_size;
  int32_t stage_in_background;  // 1: tm_saver_save returns before the data are staged.
  // Host memory for copies on this rank, for all saves in progress; 0: no limit.
  uint64_t staging_bytes;
  int32_t cancel_on_free;  // 1: freeing a job cancels its save and waits only for staging.
  int32_t reserved;
  // Memory on each device for copies, which is faster than staging on the host; 0: none.
  uint64_t device_staging_bytes;
} tm_saver_options;
// Makes a saver. Every rank makes the same savers in the same order. A communicator has at most two
// at a time, besides its own saver, and must outlive them. `options` may be NULL.
TM_EXPORT tm_status tm_saver_new(tm_communicator* communicator, const tm_saver_options* options,
                                 tm_saver** out);
// Waits for the saves in progress; the jobs keep their results.
TM_EXPORT void tm_saver_free(tm_saver* saver);
// Like tm_save_async, with this saver.
TM_EXPORT tm_status tm_saver_save(tm_saver* saver, const tm_state* state, const char* path,
                                  const tm_save_options* options, tm_save_job** out);

// Waits for the result of the save and returns it. `report` may be NULL. May be called again.
TM_EXPORT tm_status tm_save_job_wait(tm_save_job* job, tm_save_report** report);
// Like tm_save_job_wait, with a limit, for hosts that must handle signals meanwhile. If the save
// ends within `timeout_ms`, *done is 1 and the save's result is returned; otherwise *done is 0 and
// TM_OK is returned. A negative `timeout_ms` is no limit.
TM_EXPORT tm_status tm_save_job_wait_for(tm_save_job* job, int64_t timeout_ms, int32_t* done,
                                         tm_save_report** report);
// Like tm_save_job_wait_for, but waits only until the caller may overwrite its buffers. Returns the
// error if the save failed before.
TM_EXPORT tm_status tm_save_job_wait_staged(tm_save_job* job, int64_t timeout_ms, int32_t* done);
// Eventfds (eventfd(2)) for event loops. tm_save_job_fd is readable from the moment that the save
// has ended, tm_save_job_staged_fd from the moment that the data are staged. The job owns both: do
// not read or close them.
TM_EXPORT tm_status tm_save_job_fd(tm_save_job* job, int* fd);
TM_EXPORT tm_status tm_save_job_staged_fd(tm_save_job* job, int* fd);
// Requests cancellation and returns at once. The ranks vote whether the save is cancelled or
// committed; a rank that has waited for others for some seconds gives up.
TM_EXPORT void tm_save_job_cancel(tm_save_job* job);

enum {
  TM_JOB_STAGING = 0,
  TM_JOB_SAVING = 1,
  TM_JOB_COMMITTED = 2,
  TM_JOB_FAILED = 3,
  TM_JOB_CANCELLED = 4
};
typedef struct tm_job_progress {
  uint32_t struct_size;  // Set before the call.
  int32_t state;
  uint64_t bytes_total;  // Size of this rank's shards and objects.
  uint64_t bytes_staged;
  uint64_t bytes_written;
  double stalled_seconds;
} tm_job_progress;
// The progress of this rank. Never blocks.
TM_EXPORT tm_status tm_save_job_progress(const tm_save_job* job, tm_job_progress* out);
TM_EXPORT void tm_save_job_free(tm_save_job* job);

// ---- Loading -------------------------------------------------------------------------------

// Handling of keys that are requested but not stored, or stored but not requested.
// TM_STRICT_DEFAULT: raise for not_stored, log for not_requested.
enum {
  TM_STRICT_DEFAULT = 0,
  TM_STRICT_RAISE = 1,
  TM_STRICT_LOG = 2,
  TM_STRICT_RETURN = 3,
  TM_STRICT_IGNORE = 4
};
enum { TM_GROW_ERROR = 0, TM_GROW_ZERO = 1, TM_GROW_KEEP = 2 };
enum { TM_GRID_ERROR = 0, TM_GRID_BY_INDEX = 1, TM_GRID_FIRST = 2, TM_GRID_SKIP = 3 };
enum { TM_VERIFY_AUTO = 0, TM_VERIFY_OFF = 1, TM_VERIFY_LEAVES = 2, TM_VERIFY_END = 3 };
enum { TM_LOAD_AUTO = 0, TM_LOAD_DIRECT = 1, TM_LOAD_EXCHANGE = 2 };
// How exchanged bytes travel (tm_load_options.exchange_via).
enum { TM_VIA_AUTO = 0, TM_VIA_HOST = 1, TM_VIA_DEVICES = 2 };

// Handling of a stored tensor or object that differs from the requested one.
typedef struct tm_load_rule {
  uint32_t struct_size;
  // 1: requested extents may be smaller than the stored ones; the tail is not loaded.
  int32_t allow_shrink;
  // A glob; '*' also matches '/'. The first rule that matches a key is used.
  const char* keys;
  int32_t grow;           // TM_GROW_*: if requested extents exceed the stored ones.
  int32_t convert_dtype;  // 1: elements are converted.
  int32_t grid;           // TM_GRID_*: if an object is stored on another grid.
  int32_t reserved;
} tm_load_rule;

// Options of a load, described in tensormount/load.h. All except the hook, exchange_group and
// threads must be equal on every rank.
typedef struct tm_load_options {
  uint32_t struct_size;
  int32_t not_stored;     // Keys requested but absent.
  int32_t not_requested;  // Keys stored but requested by no rank.
  int32_t validate;       // 1: requests must cover every tensor exactly, as for a save.
  int32_t verify;
  int32_t path;
  int32_t exchange_group;  // Ranks with equal numbers exchange data.
  int32_t no_plan_reuse;
  // Globs of keys that are never reported as not_stored or not_requested.
  const char* const* strict_exempt;
  size_t strict_exempt_count;
  const tm_load_rule* rules;  // Each has rules[0].struct_size bytes.
  size_t rule_count;
  int64_t liveness_ms;     // 0 means 30,000.
  int64_t arrival_ms;      // 0 means 1,800,000.
  tm_event_hook on_event;  // May be NULL.
  void* on_event_context;
  int64_t total_ms;  // Limit for the whole call; 0: none.
  // Reading threads of this rank. 0: one per core available to this rank, at most 12.
  int32_t threads;
  int32_t exchange_via;
  const char* const* roots;  // Trusted directories, as in tm_open_options.
  size_t root_count;
  const char* name_map;  // As in tm_open_options.
} tm_load_options;

// The results of a load besides the data in the caller's buffers.
typedef struct tm_load_report tm_load_report;
TM_EXPORT void tm_load_report_free(tm_load_report* report);

// Collective: fills the buffers of `request` in place, whatever sharding the checkpoint was saved
// with. Every rank gets the same result. `options` and `report` may be NULL.
//   TM_NOT_FOUND         no such checkpoint, or keys that are not stored
//   TM_INVALID_ARGUMENT  shape, dtype or grid differ and no rule allows it; or keys that no rank
//                        requests, with TM_STRICT_RAISE
//   TM_DATA_LOSS         stored bytes are missing or damaged
//   TM_STALE             the ranks opened different checkpoints
TM_EXPORT tm_status tm_load(const tm_state* request, const char* path,
                            tm_communicator* communicator, const tm_load_options* options,
                            tm_load_report** report);

// Loads in the background, on a thread of the library, and returns at once; an invalid request is
// reported as the result of the job. After the return `request` may be freed. Until the load has
// ended its buffers must stay, and `communicator` serves only background loads, which run one after
// the other; other calls need a channel of `communicator`.
typedef struct tm_load_job tm_load_job;
TM_EXPORT tm_status tm_load_async(const tm_state* request, const char* path,
                                  tm_communicator* communicator, const tm_load_options* options,
                                  tm_load_job** out);
// Like tm_save_job_wait_for, for a load.
TM_EXPORT tm_status tm_load_job_wait(tm_load_job* job, int64_t timeout_ms, int32_t* done,
                                     tm_load_report** report);
// An eventfd(2) for event loops, readable from the moment that the load has ended. The job owns it:
// do not read or close it.
TM_EXPORT tm_status tm_load_job_fd(tm_load_job* job, int* fd);
// Bytes that this rank has read from storage so far. Never blocks.
TM_EXPORT uint64_t tm_load_job_bytes_read(const tm_load_job* job);
// Requests cancellation, like tm_save_job_cancel.
TM_EXPORT void tm_load_job_cancel(tm_load_job* job);
// Cancels the load and waits until nothing writes to the buffers any more.
TM_EXPORT void tm_load_job_free(tm_load_job* job);

// The whole report as one line of JSON, like tm_save_report_json: "uuid", "numbers" (the members of
// tm_load_numbers), the lists "not_stored", "not_requested", "skipped" and "converted", and
// "uncovered", a list of {"key", "begin", "extent", "zeroed"}. Objects and common values, which may
// be large, are only in the functions below.
TM_EXPORT tm_status tm_load_report_json(const tm_load_report* report, char** json);

// The numbers of a load report, all of this rank; times are in seconds.
typedef struct tm_load_numbers {
  uint32_t struct_size;  // Set before the call.
  int32_t plan_reused;
  uint64_t bytes_wanted;
  uint64_t bytes_read;
  uint64_t bytes_received;  // From other ranks.
  // Bytes by kind of verification: leaf hashes, digests, none. The three add up to bytes_wanted.
  uint64_t bytes_by_leaf;
  uint64_t bytes_by_digest;
  uint64_t bytes_unverified;
  uint64_t messages_sent;
  uint64_t peak_buffer_bytes;
  double plan_seconds;
  double read_seconds;
  double proof_seconds;
  uint64_t bytes_between_devices;  // Part of bytes_received.
} tm_load_numbers;
TM_EXPORT tm_status tm_load_report_numbers(const tm_load_report* report, tm_load_numbers* out);

// The loaded checkpoint's UUID; "" for foreign formats. Valid as long as the report.
TM_EXPORT const char* tm_load_report_uuid(const tm_load_report* report);

// Lists of a load report. not_stored, not_requested (filled with TM_STRICT_RETURN): keys requested
// but absent, and keys stored but requested by no rank. skipped: keys of this rank of which nothing
// was loaded. converted: tensors whose elements were converted.
TM_EXPORT tm_status tm_load_report_not_stored(const tm_load_report* report, tm_list** out);
TM_EXPORT tm_status tm_load_report_not_requested(const tm_load_report* report, tm_list** out);
TM_EXPORT tm_status tm_load_report_skipped(const tm_load_report* report, tm_list** out);
TM_EXPORT tm_status tm_load_report_converted(const tm_load_report* report, tm_list** out);

// Requested elements outside the stored tensor (tm_load_rule.grow).
typedef struct tm_uncovered {
  uint32_t struct_size;  // Set before the call.
  int32_t rank;          // Number of axes.
  const char* key;       // Valid as long as the report.
  int32_t zeroed;        // 1: set to zero; 0: the caller's values were kept.
  int32_t reserved;
  int64_t begin[TM_MAX_RANK];
  int64_t extent[TM_MAX_RANK];
} tm_uncovered;
TM_EXPORT size_t tm_load_report_uncovered_count(const tm_load_report* report);
// Uncovered region number `index`. TM_NOT_FOUND if `index` is out of range.
TM_EXPORT tm_status tm_load_report_uncovered(const tm_load_report* report, size_t index,
                                             tm_uncovered* out);

// Like tm_checkpoint_object, tm_checkpoint_common, tm_checkpoint_rank_common and
// tm_checkpoint_metadata. TM_NOT_FOUND: the value was not requested, or is not stored.
TM_EXPORT tm_status tm_load_report_object(const tm_load_report* report, const char* key,
                                          const int64_t* index, int32_t rank, void** data,
                                          size_t* size);
TM_EXPORT tm_status tm_load_report_common(const tm_load_report* report, const char* name,
                                          char** json, size_t* size);
TM_EXPORT tm_status tm_load_report_rank_common(const tm_load_report* report, int32_t rank,
                                               const char* name, char** json, size_t* size);
TM_EXPORT tm_status tm_load_report_metadata(const tm_load_report* report, char** json,
                                            size_t* size);
// The request's local value `name` (tm_state_set_local).
TM_EXPORT tm_status tm_load_report_local(const tm_load_report* report, const char* name,
                                         char** json, size_t* size);

// ---- Calls that take long -------------------------------------------------------------------

// Lets another thread cancel a long call and read its progress. A task serves one call at a time
// and must outlive it; these functions may be called from any thread.
typedef struct tm_task tm_task;
TM_EXPORT tm_status tm_task_new(tm_task** out);
// Makes the task's call end with TM_CANCELLED at its next block, unless it ends by itself before.
TM_EXPORT void tm_task_cancel(tm_task* task);
// From now on, calls of this thread that wait for a server (sources behind URLs) end with
// TM_CANCELLED within 0.1 s once `task` is cancelled, also those without a parameter for it, such
// as tm_checkpoint_read. NULL ends that. The task must live until then.
TM_EXPORT void tm_task_watch_thread(tm_task* task);
// Bytes done so far, and bytes in all; 0 while unknown. Either pointer may be NULL.
TM_EXPORT void tm_task_progress(const tm_task* task, uint64_t* done, uint64_t* total);
TM_EXPORT void tm_task_free(tm_task* task);

// ---- Checking a layout ---------------------------------------------------------------------

// Options of a check, described by ValidateOptions in tensormount/validate.h.
typedef struct tm_validate_options {
  uint32_t struct_size;
  uint32_t limit;       // Findings listed at most; 0: 100.
  int64_t liveness_ms;  // 0 means 30,000.
  int64_t arrival_ms;   // 0 means 1,800,000.
  int64_t total_ms;     // Limit for the whole call; 0: none.
  tm_task* task;        // May be NULL. A cancelled rank waits three seconds for the others.
} tm_validate_options;
// Collective: checks whether the ranks' parts together form a complete checkpoint. Reads no data.
// The status reports whether the check ran; *sound (1 or 0) and the JSON report are its result,
// equal on every rank. `options` and `json` may be NULL; *json is freed with tm_free.
TM_EXPORT tm_status tm_validate(const tm_state* state, tm_communicator* communicator,
                                const tm_validate_options* options, int32_t* sound, char** json);
// Collective: returns the layout of the whole job as a spec (docs/spec.md), which `tensormount
// check` validates without the job. Reads no data. *json, freed with tm_free, is the spec on rank 0
// and "" elsewhere. `options` may be NULL; its limit is ignored.
TM_EXPORT tm_status tm_dump_spec(const tm_state* state, tm_communicator* communicator,
                                 const tm_validate_options* options, char** json);

// ---- The command -----------------------------------------------------------------------------

// Runs the command `tensormount` and returns its exit status (docs/cli.md). Call it once, from
// main, before there are threads: it configures the allocator, handles SIGBUS, and may fork, block
// signals and write to the standard streams. Only the library in the Python wheel has the command;
// the library of the Debian packages prints an error and returns 2, because its command is a
// separate program.
TM_EXPORT int tm_main(int argc, char** argv);

#ifdef __cplusplus
}  // extern "C"
#endif

#include "tensormount/c_store.h"

#endif  // TENSORMOUNT_C_H_
