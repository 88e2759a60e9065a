// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_PICKLE_WRITER_H_
#define TENSORMOUNT_FS_FORMATS_PICKLE_WRITER_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tensormount/box.h"
#include "tensormount/common_value.h"

// Python pickles, written (the opcodes are those of CPython's Lib/pickletools.py).

namespace tensormount::fs {

// Every call appends what Python's pickler would for such a value; the caller keeps the stack
// machine's order. Strings and globals are remembered and named again where they recur, as Python
// does for equal objects: a state dict would be half as large again without. A tuple of two, say:
//
//   writer.Int(1); writer.Int(2); writer.Tuple2();
//
// The names of the calls are those of the opcodes (Lib/pickle.py).
//
// Only a writer: nothing here reads a pickle (index/archives/pickle.h does, without running it).
// Readers of what it writes are torch.load with weights_only, whose unpickler knows only the
// opcodes and globals of protocol 2 that torch itself uses, and torch.distributed.checkpoint, which
// unpickles .metadata.
class PickleWriter {
 public:
  // 2: what torch.save writes, and torch.load reads with weights_only; 4: what pickle.dump writes.
  explicit PickleWriter(int protocol);

  void None() { Op('N'); }
  void Bool(bool value) { Op(value ? '\x88' : '\x89'); }
  void Int(std::int64_t value);
  // Python has one type of integers: what does not fit 64 bits with a sign is written longer
  // (LONG1).
  void Unsigned(std::uint64_t value);
  void Float(double value);
  // What is no UTF-8 makes a pickle that Python refuses to load.
  void String(std::string_view utf8);
  // Protocol 2 has no bytes: there it is a call of _codecs.encode, as Python's own pickler does it.
  void Bytes(std::string_view bytes);
  // A class or function by name, which the reader imports.
  void Global(std::string_view module, std::string_view name);
  // A tuple of integers.
  void Tuple(const Dims& values);
  // Dicts, lists and tuples recursively; common values are bounded in depth when they are saved.
  void Common(const CommonValue& value);

  void Mark() { Op('('); }
  void EmptyTuple() { Op(')'); }
  void EmptyList() { Op(']'); }
  void EmptyDict() { Op('}'); }
  void TupleFromMark() { Op('t'); }
  void Tuple1() { Op('\x85'); }
  void Tuple2() { Op('\x86'); }
  void Appends() { Op('e'); }
  void SetItems() { Op('u'); }
  void Reduce() { Op('R'); }
  void Build() { Op('b'); }
  void NewObject() { Op('\x81'); }
  void PersistentId() { Op('Q'); }

  // What stands on top of the stack, to be had again with Get.
  // The memo of the pickle machine: slots are numbered in the order of Put.
  std::uint32_t Put();
  void Get(std::uint32_t slot);

  // What protocol 4 writes before that many bytes; one byte more ends the pickle that is only them.
  // So that an object of any size can be a pickle without its bytes going through here.
  static std::string BytesHead(std::uint64_t length);

  // Ends the stream. Once.
  std::string Finish();

 private:
  void Op(char op) { out_.push_back(op); }
  void Little(std::uint64_t value, int bytes);
  void RawString(std::string_view utf8);

  const int protocol_;
  std::string out_;
  std::uint32_t slots_ = 0;
  // By value: the slot in which a string or global was put when it was written first.
  std::unordered_map<std::string, std::uint32_t> strings_;
  std::map<std::pair<std::string, std::string>, std::uint32_t> globals_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_PICKLE_WRITER_H_
