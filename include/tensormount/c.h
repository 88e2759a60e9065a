// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_C_H_
#define TENSORMOUNT_C_H_

// The C interface of tensormount, for C99 and for other languages: open, list, read, save, load.
//
// Stable: functions are only ever added, numbers of enumerators never change, structures only grow
// at their end. Every structure begins with `struct_size`, which the caller sets to sizeof the
// structure that it was compiled with; members beyond are taken as zero, and zero always means
// "nothing special". A larger structure than the library knows is accepted where what is beyond is
// zero, and is TM_UNSUPPORTED otherwise; a size that no structure has is TM_INVALID_ARGUMENT.
//
// Every function that can fail returns a tm_status; tm_last_error() then says why, for people.
// Results come through pointers, which are not touched on failure (but for buffers that are being
// filled). What a function hands out as `T** out` is the caller's and freed with the function that
// is named there; every free function takes NULL. Texts are UTF-8 and end with a NUL. Pointers may
// not be NULL where not said otherwise.
//
// A process that is forked has the handles of its parent, but neither its threads nor its place
// among the ranks: checkpoints, communicators, savers and jobs answer TM_UNSUPPORTED there and name
// themselves, and freeing them does nothing. It opens and makes its own.
//
// Threads: a checkpoint may be used by several threads at a time, everything else by one at a time.
// A communicator may be used by several threads where they use different channels of it
// (tm_communicator_channel).
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
  TM_UNAVAILABLE = 8,         // A peer or file system may come back.
  TM_DEADLINE_EXCEEDED = 9,   // Somebody, who is named, did not answer in time.
  TM_BUSY = 10,
  TM_STALE = 11,        // The checkpoint or staging is gone.
  TM_UNKNOWN = 12,      // The store did not say whether a commit happened.
  TM_UNSUPPORTED = 13,  // Not built in, or a newer format or structure.
  TM_CANCELLED = 14,
  TM_INTERNAL = 15  // A bug in tensormount.
};

// "NOT_FOUND" and so on; "UNKNOWN_STATUS" for other numbers.
TM_EXPORT const char* tm_status_name(tm_status status);
// Of the last call on this thread that failed; "" where none did. Stays until the next one fails.
TM_EXPORT const char* tm_last_error(void);
// The errno of the system call that failed there, or that which stands for its status.
TM_EXPORT int tm_last_errno(void);
// All of it as fields, for programs: a JSON object with "code" ("NOT_FOUND"), "status" (its
// number), "errno", "message", and, each where it is known, "rank" (that failed or did not come),
// "key" (of a tensor, an object or a common value), "box" ({"begin": [], "extent": []}, of the
// tensor "key"), "file" (of a checkpoint, or a path), "cause" (the likely one, in words),
// "memory_in_use" (true: a device may still read or write memory of the call that failed, so that
// it must not be used again as long as the process lives) and "device" ("cuda:0 (...)": that
// failed; with "UNAVAILABLE" the rank is there, and its device is not). Fields are only ever added.
// Freed with tm_free. TM_NOT_FOUND where no call failed. Leaves the last error as it is.
TM_EXPORT tm_status tm_last_error_json(char** json);
// Sets both, for libraries that add to this one, and returns `status`. `error_number` 0: that which
// stands for the status. The fields that it had are gone.
TM_EXPORT tm_status tm_set_last_error(tm_status status, int error_number, const char* message);

// "0.1.0".
TM_EXPORT const char* tm_version(void);

// ---- Logging -------------------------------------------------------------------------------

// What no caller can be told is logged, to standard error unless there is a sink. Of the whole
// process.
typedef int32_t tm_log_level;
enum { TM_LOG_DEBUG = 0, TM_LOG_INFO = 1, TM_LOG_WARNING = 2, TM_LOG_ERROR = 3 };
// What is lower is dropped; TM_LOG_WARNING at start.
TM_EXPORT tm_status tm_set_log_level(tm_log_level level);
// `line` ends with a NUL and has no line end; names in it come from outside, so it may hold control
// characters. Called on any thread, by one at a time; must not wait for calls of the library.
typedef void (*tm_log_sink)(void* context, tm_log_level level, const char* line);
// NULL restores standard error. When it returns, the former sink is not running and is not called
// again. Not from a sink.
TM_EXPORT tm_status tm_set_log_sink(tm_log_sink sink, void* context);

// Allows the library to read files where they are mapped, the fastest way to short runs: SIGBUS
// that a page raises in a function of the library becomes the error of that function, and any other
// goes to the handler that was there before. Once a process, after it has set handlers of its own;
// see tensormount/mapping_guard.h. TM_UNSUPPORTED where the system refused.
TM_EXPORT tm_status tm_enable_mapping_guard(void);

// ---- Memory that is handed out -------------------------------------------------------------

// Frees texts and bytes: what came through char** or void**.
TM_EXPORT void tm_free(void* memory);

// A list of texts, freed with tm_list_free.
typedef struct tm_list tm_list;
TM_EXPORT size_t tm_list_size(const tm_list* list);
// NULL where there is none of that number. `length` (may be NULL): without the NUL.
TM_EXPORT const char* tm_list_get(const tm_list* list, size_t index, size_t* length);
TM_EXPORT void tm_list_free(tm_list* list);

// ---- Element types, regions, buffers -------------------------------------------------------

enum {
  TM_MAX_RANK = 16  // Axes of a tensor.
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
// "bf16"; NULL for other numbers.
TM_EXPORT const char* tm_dtype_name(uint32_t dtype);
// Bits of one element; 0 for other numbers.
TM_EXPORT uint32_t tm_dtype_bits(uint32_t dtype);
// By our name, or that of safetensors ("BF16"), torch or NumPy. TM_UNSUPPORTED.
TM_EXPORT tm_status tm_dtype_from_name(const char* name, uint32_t* dtype);

// Cells of a tensor: a box, or elements [flat_first, flat_first + flat_count) of the row-major
// order of that box. Where a pointer to one may be NULL, that means the whole tensor.
typedef struct tm_region {
  uint32_t struct_size;
  int32_t rank;           // Axes.
  const int64_t* begin;   // NULL: zeros.
  const int64_t* extent;  // NULL only where rank is 0.
  int32_t is_flat;        // 1: the flat range; 0: the box.
  int32_t reserved;
  int64_t flat_first;
  int64_t flat_count;
} tm_region;

enum { TM_DEVICE_HOST = 0, TM_DEVICE_CUDA = 1 };
// How memory is reached; pageable on a device means that it was not said, and is the device's.
enum { TM_MEMORY_PAGEABLE = 0, TM_MEMORY_PINNED = 1, TM_MEMORY_MANAGED = 2, TM_MEMORY_DEVICE = 3 };
// Whether the contents are there, or once a stream has come so far.
enum {
  TM_STREAM_NONE = 0,  // With `stream` set, as programs of older headers have it: a handle.
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
  int32_t rank;            // Axes. A flat range has one.
  int32_t reserved;
  void* stream;  // A cudaStream_t that orders the contents, with TM_STREAM_HANDLE; else NULL.
  int32_t memory_kind;
  int32_t stream_kind;
  uint8_t device_uuid[16];  // Which device, whatever its ordinal is; zeros: not said.
} tm_buffer;

// ---- Reading without ranks -----------------------------------------------------------------

// A handle that holds the checkpoint open, so that it can be read to the end although it is removed
// or replaced meanwhile.
typedef struct tm_checkpoint tm_checkpoint;

// `path`: a checkpoint ("STORE/step-1000"), "STORE/latest" or "STORE", which is its latest, or what
// another program saved (docs/formats-adopted.md). Freed with tm_checkpoint_close. TM_NOT_FOUND,
// TM_DATA_LOSS, TM_UNSUPPORTED (written in a newer format).
TM_EXPORT tm_status tm_checkpoint_open(const char* path, tm_checkpoint** out);
typedef struct tm_open_options {
  uint32_t struct_size;
  int32_t reserved;
  // Folders below which data of adopted checkpoints may lie, and which links of checkpoints in
  // foreign formats may lead into.
  const char* const* roots;
  size_t root_count;
  // Of a folder in a foreign format that holds several sets of weights: the file or index to read.
  // May be NULL.
  const char* file;
} tm_open_options;
// The same with options, which may be NULL.
TM_EXPORT tm_status tm_checkpoint_open_with(const char* path, const tm_open_options* options,
                                            tm_checkpoint** out);
TM_EXPORT void tm_checkpoint_close(tm_checkpoint* checkpoint);

// Where it was found, without links and "latest"; and the 32 hex digits that no other checkpoint
// has, "" for formats of other programs. These live as long as the checkpoint.
TM_EXPORT const char* tm_checkpoint_path(const tm_checkpoint* checkpoint);
TM_EXPORT const char* tm_checkpoint_uuid(const tm_checkpoint* checkpoint);

// Keys of tensors, of objects, and what was out of order but could be mended.
TM_EXPORT tm_status tm_checkpoint_keys(const tm_checkpoint* checkpoint, tm_list** out);
TM_EXPORT tm_status tm_checkpoint_objects(const tm_checkpoint* checkpoint, tm_list** out);
TM_EXPORT tm_status tm_checkpoint_warnings(const tm_checkpoint* checkpoint, tm_list** out);

// Filled by tm_checkpoint_tensor. Only the first `rank` numbers of `shape` mean anything.
typedef struct tm_tensor_info {
  uint32_t struct_size;  // Set before the call.
  uint32_t dtype;
  int32_t rank;
  int32_t has_digest;  // 0 for files that other programs wrote.
  uint64_t bytes;
  uint64_t digest;  // CRC-64/NVME of the row-major bytes.
  int64_t shape[TM_MAX_RANK];
} tm_tensor_info;
// TM_NOT_FOUND.
TM_EXPORT tm_status tm_checkpoint_tensor(const tm_checkpoint* checkpoint, const char* key,
                                         tm_tensor_info* info);

// Fills `out` with a region of a tensor (NULL: all of it), whatever the cuts it was saved with;
// `out` may be strided. Every byte is checked where the checkpoint has checksums.
//   TM_NOT_FOUND         no such tensor
//   TM_INVALID_ARGUMENT  region, dtype or shape do not fit
//   TM_DATA_LOSS         stored bytes are missing or damaged; what `out` holds is undefined
// Reads of 8 MiB and more, and of thousands of short runs, are shared between as many threads as
// there are cores, at most 8; none is left when the call returns.
TM_EXPORT tm_status tm_checkpoint_read(const tm_checkpoint* checkpoint, const char* key,
                                       const tm_region* region, const tm_buffer* out);
// Bytes [offset, offset + size) of the row-major byte string of a tensor.
// Elements are little-endian. A range that reaches past the end is TM_INVALID_ARGUMENT.
TM_EXPORT tm_status tm_checkpoint_read_bytes(const tm_checkpoint* checkpoint, const char* key,
                                             uint64_t offset, void* out, size_t size);

// The same bytes where they are stored, without a copy, if they are one run of one file. They are
// not compared with hashes. They stay, and the checkpoint stays open, until tm_mapping_free; a file
// that somebody cuts short meanwhile raises SIGBUS where they are touched. TM_UNSUPPORTED: they are
// not one run, or cannot be mapped: read them. An empty range has data NULL.
typedef struct tm_mapping tm_mapping;
TM_EXPORT tm_status tm_checkpoint_map(const tm_checkpoint* checkpoint, const char* key,
                                      uint64_t offset, uint64_t size, tm_mapping** out);
TM_EXPORT const void* tm_mapping_data(const tm_mapping* mapping);
TM_EXPORT void tm_mapping_free(tm_mapping* mapping);

// Where the chunks of a tensor are: their boxes, files, offsets, lengths and hashes, and who wrote
// them, as JSON with the fields of `tensormount layout --json` (docs/cli.md). Freed with tm_free.
TM_EXPORT tm_status tm_checkpoint_layout(const tm_checkpoint* checkpoint, const char* key,
                                         char** json);
// The same as a picture: a whole SVG file, without scripts and references. Freed with tm_free.
TM_EXPORT tm_status tm_checkpoint_picture(const tm_checkpoint* checkpoint, const char* key,
                                          char** svg);

// The grid that an object was saved on: *rank (0: it is one piece) and that many numbers in `grid`,
// which has room for TM_MAX_RANK. TM_NOT_FOUND.
TM_EXPORT tm_status tm_checkpoint_object_grid(const tm_checkpoint* checkpoint, const char* key,
                                              int64_t* grid, int32_t* rank);
// An object, or its part `index` (of `rank` numbers; 0 for objects without a grid). Freed with
// tm_free. TM_NOT_FOUND.
TM_EXPORT tm_status tm_checkpoint_object(const tm_checkpoint* checkpoint, const char* key,
                                         const int64_t* index, int32_t rank, void** data,
                                         size_t* size);

// The common state as JSON (the form of common.json, docs/format.md): the value `name`, or, where
// `name` is NULL, all of it as one object. Freed with tm_free; `size` may be NULL. TM_NOT_FOUND.
TM_EXPORT tm_status tm_checkpoint_common(const tm_checkpoint* checkpoint, const char* name,
                                         char** json, size_t* size);
// Likewise what rank `rank` of the save set for itself.
TM_EXPORT tm_status tm_checkpoint_rank_common(const tm_checkpoint* checkpoint, int32_t rank,
                                              const char* name, char** json, size_t* size);
// What the application says about the checkpoint as a whole: an object, empty where it says
// nothing.
TM_EXPORT tm_status tm_checkpoint_metadata(const tm_checkpoint* checkpoint, char** json,
                                           size_t* size);

// ---- Communicators -------------------------------------------------------------------------

// How the ranks of a job reach each other. Everything collective below must be called by all ranks
// of the communicator, in the same order; a rank that does not come is named after a time-out, and
// the others go on with a failure. An argument that one rank cannot do anything with, other than
// the communicator itself, is told to the others, and fails the call on all of them.
typedef struct tm_communicator tm_communicator;
TM_EXPORT void tm_communicator_free(tm_communicator* communicator);
TM_EXPORT int32_t tm_communicator_rank(const tm_communicator* communicator);
TM_EXPORT int32_t tm_communicator_size(const tm_communicator* communicator);

// A group of one.
TM_EXPORT tm_status tm_communicator_self(tm_communicator** out);

// A host's own process group in three functions. The host guarantees:
//   Order    Messages from one rank to another meet the receives for them in the order in which
//            both were started. A receive always has exactly the size of the message that it meets.
//   Tag      Between these ranks nothing else uses that tag while the communicator lives.
//   Sizes    1 byte to TM_MAX_CALLBACK_MESSAGE. A message to the rank itself never occurs.
//   Requests At most one receive and 9 sends for each other rank are under way at a time. A send
//            may wait for its receive as long as it likes.
//   Progress `send` and `receive` only start, `test` only looks: nothing waits for another rank.
//   Memory   `data` stays as it is until `test` said that its request is done or failed, or
//            `cancel` returned. It is never the caller's own memory.
//   Threads  Calls come from several threads (the caller's, and one that sends heartbeats while a
//            save or load is under way), but never two at a time; they must not call the
//            communicator.
//   Failure  A request that failed says that the peer is gone: there is no second try.
enum { TM_MAX_CALLBACK_MESSAGE = 1 << 20 };
typedef struct tm_callbacks {
  uint32_t struct_size;
  uint32_t tag;   // Of all messages.
  void* context;  // Handed to each call.
  // Start; 0, with the host's number of the request in *request, or another number: cannot be.
  int (*send)(void* context, int32_t to, uint32_t tag, const void* data, uint64_t size,
              uint64_t* request);
  int (*receive)(void* context, int32_t from, uint32_t tag, void* data, uint64_t size,
                 uint64_t* request);
  // 0: under way. 1: done. Negative: failed. After the last two the request is not named again.
  int (*test)(void* context, uint64_t request);
  // May be NULL. Ends a request, whose memory is not touched afterwards. Only called when the
  // communicator is freed and the other side did not come; without it that memory is never freed.
  void (*cancel)(void* context, uint64_t request);
  // Ranks take leave of each other when they free their communicators: how long the first waits
  // for the last, in milliseconds. 0: 5,000. The callbacks must work until then.
  int64_t leave_wait_ms;
} tm_callbacks;
// Nothing is sent before it is used. `callbacks` itself is copied. Free it before what it uses.
TM_EXPORT tm_status tm_communicator_from_callbacks(const tm_callbacks* callbacks, int32_t rank,
                                                   int32_t size, tm_communicator** out);

// The same group once more, for work that goes on beside that of `parent`: channel 1 to 7. Every
// rank makes the same; `parent` must outlive it.
TM_EXPORT tm_status tm_communicator_channel(tm_communicator* parent, uint32_t channel,
                                            tm_communicator** out);
// Some ranks of `parent` as a group of their own, made by these alone; rank i is ranks[i] of it.
// Groups that share ranks need different channels (1 to 7). `parent` must outlive it.
TM_EXPORT tm_status tm_communicator_subgroup(tm_communicator* parent, const int32_t* ranks,
                                             size_t count, uint32_t channel, tm_communicator** out);

// A group of ranks that reach each other over TCP, and by Unix sockets within a machine; see
// docs/tcp.md. Each rank listens, the host program carries the addresses to all of them by whatever
// it has (torch's store, a file), and each connects. Neither waits for another rank.
typedef struct tm_tcp tm_tcp;
enum { TM_TCP_TOKEN_BYTES = 32 };
typedef struct tm_tcp_options {
  uint32_t struct_size;
  uint32_t no_unix_sockets;    // Not 0: by TCP within a machine, too.
  const char* interface_name;  // NULL: what GLOO_SOCKET_IFNAME names, or all that are up.
  const char* address;         // Of this machine, in numbers, instead. NULL: by interface.
  uint32_t first_port;         // 0 and 0: any.
  uint32_t last_port;
  int64_t connect_timeout_ms;  // 0: 30,000. How long a peer that is out of reach is tried again.
  int64_t keep_alive_ms;       // 0: 30,000; negative: never. See TcpOptions.
  int64_t leave_wait_ms;       // 0: 5,000. How long freeing it waits for what was sent.
} tm_tcp_options;
// `options` may be NULL. TM_NOT_FOUND: no such interface.
TM_EXPORT tm_status tm_tcp_listen(const tm_tcp_options* options, tm_tcp** out);
// Where this rank can be reached: printable ASCII without blanks, 512 characters at most. Valid
// until tm_tcp_free. No secret. NULL for NULL.
TM_EXPORT const char* tm_tcp_address(const tm_tcp* tcp);
// A random token: rank 0 makes it, the host program tells it to the others and nobody else. Who has
// it can join the group. `size` must be TM_TCP_TOKEN_BYTES.
TM_EXPORT tm_status tm_tcp_token(uint8_t* token, size_t size);
// Once for each tm_tcp, which may be freed afterwards. `addresses`: of all `size` ranks in their
// order, the same on all of them. TM_INVALID_ARGUMENT names the rank whose address cannot be.
TM_EXPORT tm_status tm_tcp_connect(tm_tcp* tcp, const char* const* addresses, int32_t rank,
                                   int32_t size, const uint8_t* token, size_t token_size,
                                   tm_communicator** out);
TM_EXPORT void tm_tcp_free(tm_tcp* tcp);

// The processes of an MPI job, in libtensormount_mpi. Initialises MPI where the program has not;
// tm_mpi_free finalises it then, unless tm_mpi_abandon was called (after a failure: finalising
// would wait for ranks that are gone). TM_UNSUPPORTED without MPI. Free communicators before it.
typedef struct tm_mpi tm_mpi;
TM_EXPORT tm_status tm_mpi_init(tm_mpi** out);
TM_EXPORT tm_status tm_mpi_world(tm_mpi* mpi, tm_communicator** out);
TM_EXPORT void tm_mpi_abandon(tm_mpi* mpi);
TM_EXPORT void tm_mpi_free(tm_mpi* mpi);

// ---- One rank's part of a checkpoint -------------------------------------------------------

// For saving what the rank holds, for loading what it wants.
typedef struct tm_state tm_state;
TM_EXPORT tm_status tm_state_new(tm_state** out);
TM_EXPORT void tm_state_free(tm_state* state);

// Whether one of several holders of the same cells is the one that counts.
enum { TM_REPLICA_UNLABELLED = 0, TM_REPLICA_MAIN = 1, TM_REPLICA_COPY = 2 };

// A part of a global tensor that this rank holds or wants. Both structures that it points to are
// read during the call only; the memory that `data` describes is used later.
typedef struct tm_shard {
  uint32_t struct_size;
  int32_t replica;
  const int64_t* global_shape;
  int32_t global_rank;      // Axes of the whole tensor.
  int32_t metadata_only;    // 1: `data` has no memory; for tm_validate.
  const tm_region* region;  // NULL: all of it.
  const tm_buffer* data;    // Its memory stays the caller's until the save or load has ended.
} tm_shard;
// Several shards of one key may be added. What is wrong with one is said here and fails the save
// or load on all ranks, too.
TM_EXPORT tm_status tm_state_add_tensor(tm_state* state, const char* key, const tm_shard* shard);

// Many shards at once, for callers to whom each call is dear (from Python one by one 9 us a
// tensor). `keys`: `count` texts, each with a NUL behind it, `keys_size` bytes in all. `words`:
// `word_count` numbers, for each shard in turn
//   dtype, flags, replica, axes of the whole tensor, address of the data
//   shape of the whole tensor, begin of the box, extent of the box: a number an axis each
//   flat_first, flat_count                with TM_WORDS_FLAT: that range of the box
//   strides of the data                   with TM_WORDS_STRIDED: a number an axis of the box, in
//                                         elements; one where it is flat
//   device_kind, device_ordinal, device_uuid (two numbers, its bytes in order), memory_kind,
//   stream_kind, stream                   with TM_WORDS_MEMORY: as in tm_buffer
// The data have the shape of the region, as in tm_shard. Nothing is kept of the arrays.
enum {
  TM_WORDS_STRIDED = 1,
  TM_WORDS_FLAT = 2,
  TM_WORDS_METADATA_ONLY = 4,  // No memory; the address counts for nothing.
  TM_WORDS_MEMORY = 8
};
TM_EXPORT tm_status tm_state_add_tensors(tm_state* state, const char* keys, size_t keys_size,
                                         const int64_t* words, size_t word_count, size_t count);

// The same read and checked once, for states that are made again and again: what changes from save
// to save is where the data are. Immutable; may be used by several threads.
typedef struct tm_layout tm_layout;
TM_EXPORT tm_status tm_layout_new(const char* keys, size_t keys_size, const int64_t* words,
                                  size_t word_count, size_t count, tm_layout** out);
TM_EXPORT void tm_layout_free(tm_layout* layout);
// Adds all of its shards. `addresses`: of the data of each, `count` of them as many as shards;
// NULL: those of the words.
TM_EXPORT tm_status tm_state_add_layout(tm_state* state, const tm_layout* layout,
                                        void* const* addresses, size_t count);

// Bytes, copied. One object that is the same on all ranks that add it, or part `index` of a `grid`
// of objects (of `rank` numbers; 0: no grid).
TM_EXPORT tm_status tm_state_add_object(tm_state* state, const char* key, const void* data,
                                        size_t size, const int64_t* index, const int64_t* grid,
                                        int32_t rank);
// For loading: asks for it; the report has it. `grid` NULL: whatever it was saved on.
TM_EXPORT tm_status tm_state_want_object(tm_state* state, const char* key, const int64_t* index,
                                         const int64_t* grid, int32_t rank);

// Values as JSON (the form of common.json): of all ranks; of this one; what the application says
// about the checkpoint as a whole (an object); not stored, but given back by the report.
TM_EXPORT tm_status tm_state_set_common(tm_state* state, const char* name, const char* json);
TM_EXPORT tm_status tm_state_set_rank_common(tm_state* state, const char* name, const char* json);
TM_EXPORT tm_status tm_state_set_metadata(tm_state* state, const char* json);
TM_EXPORT tm_status tm_state_set_local(tm_state* state, const char* name, const char* json);

// Tensor `key` can be read layer by layer, too: `pattern` has one "{}" for the number.
TM_EXPORT tm_status tm_state_name_layers(tm_state* state, const char* key, const char* pattern);

// What the caller itself found wrong: fails the save or load on all ranks, instead of leaving them
// waiting for one that gave up. Returns TM_OK where that was noted.
TM_EXPORT tm_status tm_state_fail(tm_state* state, tm_status status, const char* message);
// The same with the fields of the failure, which all ranks then get ("key", "device", ...), in the
// form of tm_last_error_json: "status" and "message" must be there, "code" does not count, and
// what this version does not know is ignored.
TM_EXPORT tm_status tm_state_fail_json(tm_state* state, const char* json);

// ---- Events, waiting -----------------------------------------------------------------------

enum { TM_EVENT_START = 0, TM_EVENT_END = 1, TM_EVENT_ERROR = 2 };
// One step of a save or load on this rank: each phase has a start, and then an end or an error.
typedef struct tm_event {
  uint32_t struct_size;  // Set by the library.
  int32_t kind;
  const char* job;    // "save", "load".
  const char* path;   // "STORE/NAME"
  const char* phase;  // "validate", "plan", "write", ...
  int32_t rank;
  tm_status status;  // With TM_EVENT_ERROR.
  const char* message;
  uint64_t bytes;  // Moved by this rank in the phase, with TM_EVENT_END.
  double seconds;  // That the phase took, with TM_EVENT_END and TM_EVENT_ERROR.
} tm_event;
// Called on the thread that works. Must return soon. What `event` points to is gone afterwards.
typedef void (*tm_event_hook)(void* context, const tm_event* event);

// ---- Saving --------------------------------------------------------------------------------

enum {
  TM_PLACE_AUTO = 0,
  TM_PLACE_TENSOR_FILE = 1,
  TM_PLACE_RANK_SHARD = 2,
  TM_PLACE_SAFETENSORS = 3
};
enum { TM_REPLICAS_ROTATING = 0, TM_REPLICAS_FULL = 1, TM_REPLICAS_OFF = 2 };
enum { TM_SAVE_PARALLEL = 0, TM_SAVE_MAIN = 1 };
enum { TM_COMMON_ERROR = 0, TM_COMMON_WARN = 1, TM_COMMON_OFF = 2 };

typedef struct tm_save_report tm_save_report;
// `report` is gone when the hook returns.
typedef tm_status (*tm_before_publish_hook)(void* context, const tm_save_report* report);
typedef void (*tm_on_commit_hook)(void* context, const tm_save_report* report);

// The same on every rank, but for the hooks. See tensormount/save.h.
typedef struct tm_save_options {
  uint32_t struct_size;
  int32_t placement;
  int32_t replica_check;
  int32_t replace;  // 1: an existing checkpoint is replaced at commit.
  int32_t strategy;
  int32_t common_check;
  int32_t skip_validation;  // 1: ranks do not prove beforehand that they cover every tensor.
  int32_t no_plan_reuse;
  const char* const* common_exempt;  // Globs.
  size_t common_exempt_count;
  const char* producer;    // NULL: "tensormount <version>".
  int64_t liveness_ms;     // 0: 30,000. See Timeouts in tensormount/communicator.h.
  int64_t arrival_ms;      // 0: 1,800,000.
  tm_event_hook on_event;  // May be NULL.
  void* on_event_context;
  int64_t total_ms;     // The whole call; 0: no limit.
  int32_t page_hashes;  // 1: hashes of 4 KiB as well, for reads of few rows (tensormount/save.h).
  int32_t reserved;
  // Called on the thread that saves, once what this rank wrote is durable and nothing is published
  // yet, with the report so far. What it returns other than TM_OK fails the save on all ranks, with
  // the message that it set by tm_set_last_error. It may take its time: heartbeats go on. May be
  // NULL, as the next.
  tm_before_publish_hook before_publish;
  void* before_publish_context;
  // After the commit, before the verdict is given.
  tm_on_commit_hook on_commit;
  void* on_commit_context;
  // Steps over time (tensormount/save.h). The base is a checkpoint of the same store.
  int32_t no_reuse;    // 1: everything is written, whatever the base holds.
  int32_t full_every;  // Of so many saves in a row one writes everything; 0: 50, < 0: none does.
  const char* reuse_from;  // Name of the base; NULL: the latest.
  const char* inherit;     // Name of the base of which all is taken that no rank has; NULL: none.
  // Rules, as of tm_store_prune, by which rank 0 removes checkpoints after the commit; NULL: none.
  const char* retention;
  int32_t ephemeral;  // 1: it goes when the next one is committed.
  int32_t reserved2;
} tm_save_options;

TM_EXPORT void tm_save_report_free(tm_save_report* report);

// Collective: every rank calls it with its part and the same path "STORE/NAME" and options, and
// every rank gets the same verdict. `options` and `report` may be NULL.
//   TM_OK                  committed and durable
//   TM_INVALID_ARGUMENT    the shards do not cover a tensor exactly, or ranks differ
//   TM_ALREADY_EXISTS      that name is taken
//   TM_DATA_LOSS           replicas differ
//   TM_RESOURCE_EXHAUSTED  disk full, on some rank
//   TM_DEADLINE_EXCEEDED, TM_UNAVAILABLE  a rank died or did not come, and is named
//   TM_UNKNOWN             committed or not could not be found out
TM_EXPORT tm_status tm_save(const tm_state* state, const char* path, tm_communicator* communicator,
                            const tm_save_options* options, tm_save_report** report);

// What the report says in numbers; times are in seconds. On a failed save there is no report.
typedef struct tm_save_numbers {
  uint32_t struct_size;  // Set before the call.
  int32_t plan_reused;
  uint64_t generation;
  uint64_t tensors;
  uint64_t bytes;               // Of all tensors.
  uint64_t bytes_written;       // By all ranks.
  uint64_t bytes_written_here;  // By this one.
  uint64_t replica_bytes;
  uint64_t replica_bytes_compared;
  double validate_seconds;  // Of this rank, as all below.
  double plan_seconds;
  double write_seconds;
  double compare_seconds;
  double publish_seconds;
  // What was not written, because the base holds it. Of all ranks.
  double reuse_seconds;  // Of this rank.
  uint64_t reused_tensors;
  uint64_t reused_objects;
  uint64_t reused_bytes;                // As they are stored. Of these,
  uint64_t reused_bytes_by_leaf;        // proved to be the same by hashes,
  uint64_t reused_bytes_by_comparison;  // or by comparison; the rest was inherited.
  uint64_t files_linked;
  uint64_t bytes_linked;
  uint64_t files_copied;  // Where links were refused.
  uint64_t bytes_copied;
} tm_save_numbers;
TM_EXPORT tm_status tm_save_report_numbers(const tm_save_report* report, tm_save_numbers* out);
// These live as long as the report.
TM_EXPORT const char* tm_save_report_path(const tm_save_report* report);
TM_EXPORT const char* tm_save_report_uuid(const tm_save_report* report);
// Name of the base, and why nothing of it was taken or links were refused; empty where there is
// none, or nothing to say.
TM_EXPORT const char* tm_save_report_base(const tm_save_report* report);
TM_EXPORT const char* tm_save_report_note(const tm_save_report* report);
// Files that this rank wrote, or parts of ("data/..."), and warnings.
TM_EXPORT tm_status tm_save_report_files(const tm_save_report* report, tm_list** out);
TM_EXPORT tm_status tm_save_report_warnings(const tm_save_report* report, tm_list** out);
// Of rank 0 alone: checkpoints that were removed by rule, and why others could not be.
TM_EXPORT tm_status tm_save_report_pruned(const tm_save_report* report, tm_list** out);
TM_EXPORT tm_status tm_save_report_not_pruned(const tm_save_report* report, tm_list** out);

// A save in the background, with a saver that belongs to the communicator (its memory is used again
// by the next): returns when the bytes are staged (copied), without waiting for other ranks, while
// fewer than two others are under way. `state` may go then. Freeing the job waits for the save, and
// so does freeing the communicator; the verdict stays with the job. What the hook's context points
// to must stay until the verdict.
typedef struct tm_save_job tm_save_job;
TM_EXPORT tm_status tm_save_async(const tm_state* state, const char* path,
                                  tm_communicator* communicator, const tm_save_options* options,
                                  tm_save_job** out);
// The same without a copy: for callers who wait for the verdict, but not blindly. The memory that
// `state` describes is written from, and must stay as it is until the verdict.
TM_EXPORT tm_status tm_save_in_place(const tm_state* state, const char* path,
                                     tm_communicator* communicator, const tm_save_options* options,
                                     tm_save_job** out);

// A saver with memory and ways of its own; see AsyncOptions in tensormount/async_save.h.
typedef struct tm_saver tm_saver;
typedef struct tm_saver_options {
  uint32_t struct_size;
  int32_t stage_in_background;  // 1: tm_saver_save returns at once; wait for "staged".
  uint64_t staging_bytes;       // For copies, on this rank, of all saves under way; 0: no bound.
  int32_t cancel_on_free;       // 1: freeing a job cancels it, and waits for "staged" alone.
  int32_t reserved;
  // For copies within each device, which are staged sooner; 0: none, they go to the host.
  uint64_t device_staging_bytes;
} tm_saver_options;
// Every rank makes the same ones, in the same order; a communicator has at most two at a time
// besides its own. `communicator` must outlive it. `options` may be NULL.
TM_EXPORT tm_status tm_saver_new(tm_communicator* communicator, const tm_saver_options* options,
                                 tm_saver** out);
// Waits for the saves under way; their verdicts stay with the jobs.
TM_EXPORT void tm_saver_free(tm_saver* saver);
// As tm_save_async.
TM_EXPORT tm_status tm_saver_save(tm_saver* saver, const tm_state* state, const char* path,
                                  const tm_save_options* options, tm_save_job** out);

// Until the verdict, that of tm_save. `report` may be NULL. May be called again.
TM_EXPORT tm_status tm_save_job_wait(tm_save_job* job, tm_save_report** report);
// The same for a time, for hosts that must look after signals meanwhile: *done is 1 where the
// verdict, which is the status then, was there within `timeout_ms`, and 0 otherwise, with TM_OK.
// Less than 0: no limit.
TM_EXPORT tm_status tm_save_job_wait_for(tm_save_job* job, int64_t timeout_ms, int32_t* done,
                                         tm_save_report** report);
// Likewise until the caller may overwrite its buffers, or what made the save fail before that.
TM_EXPORT tm_status tm_save_job_wait_staged(tm_save_job* job, int64_t timeout_ms, int32_t* done);
// For event loops: an eventfd(2) that is readable once that is so, and stays it. It belongs to the
// job: not to be read or closed.
TM_EXPORT tm_status tm_save_job_fd(tm_save_job* job, int* fd);
TM_EXPORT tm_status tm_save_job_staged_fd(tm_save_job* job, int* fd);
// Asks for its end; the ranks vote, and who has waited for others for some seconds gives up. Does
// not wait.
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
  uint64_t bytes_total;  // Of this rank.
  uint64_t bytes_staged;
  uint64_t bytes_written;
  double stalled_seconds;
} tm_job_progress;
// Local; never waits.
TM_EXPORT tm_status tm_save_job_progress(const tm_save_job* job, tm_job_progress* out);
TM_EXPORT void tm_save_job_free(tm_save_job* job);

// ---- Loading -------------------------------------------------------------------------------

// What to do about keys on one side only. TM_STRICT_DEFAULT: raise for not_stored, log for
// not_requested.
enum {
  TM_STRICT_DEFAULT = 0,
  TM_STRICT_RAISE = 1,
  TM_STRICT_LOG = 2,
  TM_STRICT_RETURN = 3,
  TM_STRICT_IGNORE = 4
};
enum { TM_GROW_ERROR = 0, TM_GROW_ZERO = 1, TM_GROW_KEEP = 2 };
enum { TM_GRID_ERROR = 0, TM_GRID_BY_INDEX = 1, TM_GRID_FIRST = 2, TM_GRID_SKIP = 3 };
enum { TM_VERIFY_AUTO = 0, TM_VERIFY_OFF = 1, TM_VERIFY_LEAVES = 2 };
enum { TM_LOAD_AUTO = 0, TM_LOAD_DIRECT = 1, TM_LOAD_EXCHANGE = 2 };
// tm_load_options.exchange_via
enum { TM_VIA_AUTO = 0, TM_VIA_HOST = 1, TM_VIA_DEVICES = 2 };

// What a load does where the stored tensor or object differs from the one asked for.
typedef struct tm_load_rule {
  uint32_t struct_size;
  int32_t allow_shrink;   // 1: extents asked for may be smaller; the tail is left out.
  const char* keys;       // A glob; '*' crosses '/'. The first rule that matches a key holds.
  int32_t grow;           // Extents asked for are larger.
  int32_t convert_dtype;  // 1: elements are converted.
  int32_t grid;           // An object that is stored on another grid.
  int32_t reserved;
} tm_load_rule;

// The same on every rank, but for the hook and exchange_group. See tensormount/load.h.
typedef struct tm_load_options {
  uint32_t struct_size;
  int32_t not_stored;     // Asked for, absent.
  int32_t not_requested;  // Stored, asked for by nobody.
  int32_t validate;       // 1: requests must cover every tensor exactly, as on a save.
  int32_t verify;
  int32_t path;
  int32_t exchange_group;  // Ranks with equal numbers exchange.
  int32_t no_plan_reuse;
  const char* const* strict_exempt;  // Globs of keys that neither set contains.
  size_t strict_exempt_count;
  const tm_load_rule* rules;  // All of rules[0].struct_size bytes.
  size_t rule_count;
  int64_t liveness_ms;     // 0: 30,000.
  int64_t arrival_ms;      // 0: 1,800,000.
  tm_event_hook on_event;  // May be NULL.
  void* on_event_context;
  int64_t total_ms;  // The whole call; 0: no limit.
  int32_t threads;   // Of this rank, that read. 0: as many as have a core each, at most 12.
  int32_t exchange_via;
  const char* const* roots;  // As those of tm_open_options.
  size_t root_count;
} tm_load_options;

// What a load found out besides the bytes, which are in the caller's buffers.
typedef struct tm_load_report tm_load_report;
TM_EXPORT void tm_load_report_free(tm_load_report* report);

// Collective: fills the buffers of `request` in place, whatever the sharding that the checkpoint
// was saved with. Every rank gets the same verdict. `options` and `report` may be NULL.
//   TM_NOT_FOUND         no such checkpoint, or keys that are not stored
//   TM_INVALID_ARGUMENT  shape, dtype or grid differ and no rule allows it
//   TM_DATA_LOSS         stored bytes are missing or damaged
TM_EXPORT tm_status tm_load(const tm_state* request, const char* path,
                            tm_communicator* communicator, const tm_load_options* options,
                            tm_load_report** report);

// A load in the background, on a thread of the library: returns at once, also where what was asked
// cannot be done, which is the verdict then. `request` may go, but the buffers that it describes
// are the load's until the verdict, and so is `communicator`, but for its channels and for further
// loads in the background, which run one after the other.
typedef struct tm_load_job tm_load_job;
TM_EXPORT tm_status tm_load_async(const tm_state* request, const char* path,
                                  tm_communicator* communicator, const tm_load_options* options,
                                  tm_load_job** out);
// As tm_save_job_wait_for, with the verdict of tm_load.
TM_EXPORT tm_status tm_load_job_wait(tm_load_job* job, int64_t timeout_ms, int32_t* done,
                                     tm_load_report** report);
TM_EXPORT tm_status tm_load_job_fd(tm_load_job* job, int* fd);
// From storage, by this rank so far. Never waits.
TM_EXPORT uint64_t tm_load_job_bytes_read(const tm_load_job* job);
// Asks for its end, as tm_save_job_cancel.
TM_EXPORT void tm_load_job_cancel(tm_load_job* job);
// Cancels it and waits until nothing writes to the buffers any more.
TM_EXPORT void tm_load_job_free(tm_load_job* job);

// As those of saves.
typedef struct tm_load_numbers {
  uint32_t struct_size;  // Set before the call.
  int32_t plan_reused;
  uint64_t bytes_wanted;  // Of this rank, as all below.
  uint64_t bytes_read;
  uint64_t bytes_received;  // From other ranks.
  uint64_t bytes_by_leaf;   // Verified how; the three add up to bytes_wanted.
  uint64_t bytes_by_digest;
  uint64_t bytes_unverified;
  uint64_t messages_sent;
  uint64_t peak_buffer_bytes;
  double plan_seconds;
  double read_seconds;
  double proof_seconds;
  uint64_t bytes_between_devices;  // Of bytes_received.
} tm_load_numbers;
TM_EXPORT tm_status tm_load_report_numbers(const tm_load_report* report, tm_load_numbers* out);

// Of the checkpoint that was loaded; "" for formats of other programs. Lives as long as the report.
TM_EXPORT const char* tm_load_report_uuid(const tm_load_report* report);

// With TM_STRICT_RETURN: keys asked for and absent; stored and asked for by nobody. Keys of this
// rank of which nothing was loaded. Tensors whose elements were converted.
TM_EXPORT tm_status tm_load_report_not_stored(const tm_load_report* report, tm_list** out);
TM_EXPORT tm_status tm_load_report_not_requested(const tm_load_report* report, tm_list** out);
TM_EXPORT tm_status tm_load_report_skipped(const tm_load_report* report, tm_list** out);
TM_EXPORT tm_status tm_load_report_converted(const tm_load_report* report, tm_list** out);

// Cells that the stored tensor does not have (tm_load_rule.grow).
typedef struct tm_uncovered {
  uint32_t struct_size;  // Set before the call.
  int32_t rank;          // Axes.
  const char* key;       // Lives as long as the report.
  int32_t zeroed;        // 0: the caller's values were kept.
  int32_t reserved;
  int64_t begin[TM_MAX_RANK];
  int64_t extent[TM_MAX_RANK];
} tm_uncovered;
TM_EXPORT size_t tm_load_report_uncovered_count(const tm_load_report* report);
// TM_NOT_FOUND where there is none of that number.
TM_EXPORT tm_status tm_load_report_uncovered(const tm_load_report* report, size_t index,
                                             tm_uncovered* out);

// As the functions of tm_checkpoint of these names. TM_NOT_FOUND: not asked for, or not stored.
TM_EXPORT tm_status tm_load_report_object(const tm_load_report* report, const char* key,
                                          const int64_t* index, int32_t rank, void** data,
                                          size_t* size);
TM_EXPORT tm_status tm_load_report_common(const tm_load_report* report, const char* name,
                                          char** json, size_t* size);
TM_EXPORT tm_status tm_load_report_rank_common(const tm_load_report* report, int32_t rank,
                                               const char* name, char** json, size_t* size);
TM_EXPORT tm_status tm_load_report_metadata(const tm_load_report* report, char** json,
                                            size_t* size);
// What the request had (tm_state_set_local).
TM_EXPORT tm_status tm_load_report_local(const tm_load_report* report, const char* name,
                                         char** json, size_t* size);

// ---- Calls that take long -------------------------------------------------------------------

// By it another thread ends a call that takes long, and sees how far it is. One for one call at a
// time, which it must outlive; these functions may be called from any thread.
typedef struct tm_task tm_task;
TM_EXPORT tm_status tm_task_new(tm_task** out);
// The call ends with TM_CANCELLED at its next block, where it has not ended by itself before.
TM_EXPORT void tm_task_cancel(tm_task* task);
// Bytes done, and in all; 0 while that is not known. Either may be NULL.
TM_EXPORT void tm_task_progress(const tm_task* task, uint64_t* done, uint64_t* total);
TM_EXPORT void tm_task_free(tm_task* task);

// ---- Checking a layout ---------------------------------------------------------------------

// As ValidateOptions in tensormount/validate.h.
typedef struct tm_validate_options {
  uint32_t struct_size;
  uint32_t limit;       // Findings that are listed; 0: 100.
  int64_t liveness_ms;  // 0: 30,000.
  int64_t arrival_ms;   // 0: 1,800,000.
  int64_t total_ms;     // The whole call; 0: no limit.
  tm_task* task;        // May be NULL. A rank that was cancelled waits three seconds for others.
} tm_validate_options;
// Collective: whether what the ranks hold together is a checkpoint. Reads no data. The status is
// about the call; *sound (1 or 0) and the report, as JSON, about the layout, the same on every
// rank. `options` may be NULL, and so may `json`, which is freed with tm_free.
TM_EXPORT tm_status tm_validate(const tm_state* state, tm_communicator* communicator,
                                const tm_validate_options* options, int32_t* sound, char** json);
// Collective: the layout of the whole job as a spec (docs/spec.md), which `tensormount check`
// judges as tm_validate does, without the job. Reads no data. *json, freed with tm_free, is the
// text at rank 0 and "" elsewhere. `options` may be NULL; its limit is not looked at.
TM_EXPORT tm_status tm_dump_spec(const tm_state* state, tm_communicator* communicator,
                                 const tm_validate_options* options, char** json);

// ---- The command -----------------------------------------------------------------------------

// The command `tensormount`: parses, runs one subcommand, returns the exit status (docs/cli.md).
// For a program that is nothing but it: sets how the process allocates, handles SIGBUS, and may
// fork, block signals and write to the standard streams; so it is called once, from main, before
// there are threads. In the library of the Python wheel, whose command is a program of one line.
// The library of the Debian packages refuses in words, with exit status 2: its command needs no
// library, which starts faster.
TM_EXPORT int tm_main(int argc, char** argv);

#ifdef __cplusplus
}  // extern "C"
#endif

#include "tensormount/c_store.h"

#endif  // TENSORMOUNT_C_H_
