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

// Writes Python pickles (opcodes of CPython's Lib/pickletools.py).

namespace tensormount::fs {

// Every function appends a value in opcodes of Python's pickler (Lib/pickle.py), not always the
// shortest ones, or the opcode that it is named after. The caller is responsible for the order on
// the pickle's stack. Repeated strings and globals are memoized, as Python does; without this a
// state dict would be 50 % larger. A tuple of two:
//
//   writer.Int(1); writer.Int(2); writer.Tuple2();
//
// Two programs read the output: torch.load with weights_only, which knows only the opcodes and
// globals of protocol 2 that torch uses, and torch.distributed.checkpoint, which unpickles
// .metadata (protocol 4). index/archives/pickle.h reads pickles.
class PickleWriter {
 public:
  // `protocol`: 2, as torch.save uses, for files that torch.load reads with weights_only; 4, as
  // pickle.dump uses, for other pickles.
  explicit PickleWriter(int protocol);

  void None() { Op('N'); }
  void Bool(bool value) { Op(value ? '\x88' : '\x89'); }
  void Int(std::int64_t value);
  // Values of 2^63 and above are written with the opcode LONG1; in Python all are of type int.
  void Unsigned(std::uint64_t value);
  void Float(double value);
  // The caller must pass valid UTF-8, because Python refuses to load other strings.
  void String(std::string_view utf8);
  // Protocol 2 has no opcode for bytes, so there a call of _codecs.encode is written, as Python's
  // pickler does.
  void Bytes(std::string_view bytes);
  // Writes a class or function by its name; the program that loads the pickle imports it.
  void Global(std::string_view module, std::string_view name);
  // Writes a tuple of integers.
  void Tuple(const Dims& values);
  // Writes a common value. The recursion into dicts, lists and tuples is bounded, because a save
  // limits how deep common values nest.
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

  // Memoizes the value on top of the stack and returns its slot; Get(slot) pushes the value again.
  // Slots are numbered from 0 in the order of the calls of Put.
  std::uint32_t Put();
  void Get(std::uint32_t slot);

  // The beginning of a protocol 4 pickle of a bytes object; the object's `length` bytes and one
  // STOP byte complete the pickle. So an object of any size becomes a pickle without copying its
  // bytes.
  static std::string BytesHead(std::uint64_t length);

  // Ends the pickle and returns it. Call it once.
  std::string Finish();

 private:
  void Op(char op) { out_.push_back(op); }
  void Little(std::uint64_t value, int bytes);
  void RawString(std::string_view utf8);

  const int protocol_;
  std::string out_;
  std::uint32_t slots_ = 0;
  // Slot of each string or global that was written.
  std::unordered_map<std::string, std::uint32_t> strings_;
  std::map<std::pair<std::string, std::string>, std::uint32_t> globals_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_PICKLE_WRITER_H_
