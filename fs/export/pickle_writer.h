// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_PICKLE_WRITER_H_
#define TENSORMOUNT_FS_EXPORT_PICKLE_WRITER_H_

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
class PickleWriter {
 public:
  // 2: what torch.save writes, and torch.load reads with weights_only; 4: what pickle.dump writes.
  explicit PickleWriter(int protocol);

  void None() { Op('N'); }
  void Bool(bool value) { Op(value ? '\x88' : '\x89'); }
  void Int(std::int64_t value);
  void Unsigned(std::uint64_t value);
  void Float(double value);
  void String(std::string_view utf8);
  void Bytes(std::string_view bytes);
  void Global(std::string_view module, std::string_view name);
  // A tuple of integers.
  void Tuple(const Dims& values);
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
  std::uint32_t Put();
  void Get(std::uint32_t slot);

  // What protocol 4 writes before that many bytes; one byte more ends the pickle that is only them.
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
  std::unordered_map<std::string, std::uint32_t> strings_;
  std::map<std::pair<std::string, std::string>, std::uint32_t> globals_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_PICKLE_WRITER_H_
