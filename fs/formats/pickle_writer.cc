// SPDX-License-Identifier: Apache-2.0
// Writes pickles of the kinds of values that exports need, as Python's own pickler does.
#include "fs/formats/pickle_writer.h"

#include <bit>
#include <limits>

namespace tensormount::fs {

PickleWriter::PickleWriter(int protocol) : protocol_(protocol) {
  // Opcode PROTO: the version of the protocol.
  Op('\x80');
  Op(static_cast<char>(protocol));
}

void PickleWriter::Little(std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out_.push_back(static_cast<char>(value >> (8 * i)));
}

// Uses the shortest of the opcodes BININT1, BININT2, BININT and LONG1 that has room for the value.
// LONG1 always gets 8 bytes here; Python writes fewer if they suffice.
void PickleWriter::Int(std::int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    Op('K');
    Little(static_cast<std::uint64_t>(value), 1);
  } else if (value >= 0 && value <= 0xFFFF) {
    Op('M');
    Little(static_cast<std::uint64_t>(value), 2);
  } else if (value >= std::numeric_limits<std::int32_t>::min() &&
             value <= std::numeric_limits<std::int32_t>::max()) {
    Op('J');
    Little(static_cast<std::uint64_t>(value), 4);
  } else {
    Op('\x8a');
    Little(8, 1);
    Little(static_cast<std::uint64_t>(value), 8);
  }
}

void PickleWriter::Unsigned(std::uint64_t value) {
  if (value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    Int(static_cast<std::int64_t>(value));
    return;
  }
  Op('\x8a');  // Two's complement: an extra zero byte keeps the value positive.
  Little(9, 1);
  Little(value, 8);
  Little(0, 1);
}

void PickleWriter::Float(double value) {
  Op('G');
  // BINFLOAT is big-endian, unlike all other numbers.
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int i = 7; i >= 0; --i) out_.push_back(static_cast<char>(bits >> (8 * i)));
}

// Writes SHORT_BINUNICODE, which exists since protocol 4, or BINUNICODE with a 32-bit length.
void PickleWriter::RawString(std::string_view utf8) {
  if (protocol_ >= 4 && utf8.size() <= 0xFF) {
    Op('\x8c');
    Little(utf8.size(), 1);
  } else {
    Op('X');
    Little(utf8.size(), 4);
  }
  out_.append(utf8);
}

void PickleWriter::String(std::string_view utf8) {
  // If the string is new, Put below returns slots_ as its slot.
  const auto [it, added] = strings_.emplace(utf8, slots_);
  if (!added) {
    Get(it->second);
    return;
  }
  RawString(utf8);
  Put();
}

std::string PickleWriter::BytesHead(std::uint64_t length) {
  // The opcodes PROTO 4 and BINBYTES8; a length of 8 bytes follows.
  std::string out("\x80\x04\x8e", 3);
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(length >> (8 * i)));
  return out;
}

void PickleWriter::Bytes(std::string_view bytes) {
  if (protocol_ >= 4) {
    Op('\x8e');
    Little(bytes.size(), 8);
    out_.append(bytes);
    return;
  }
  // For protocols without bytes, Python writes a text whose Latin-1 encoding is the bytes.
  Global("_codecs", "encode");
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      text.push_back(c);
    } else {
      text.push_back(static_cast<char>(0xC0 | (byte >> 6)));
      text.push_back(static_cast<char>(0x80 | (byte & 0x3F)));
    }
  }
  RawString(text);
  String("latin1");
  Tuple2();
  Reduce();
}

void PickleWriter::Global(std::string_view module, std::string_view name) {
  const auto [it, added] = globals_.emplace(std::pair(module, name), 0);
  if (!added) {
    Get(it->second);
    return;
  }
  if (protocol_ >= 4) {
    String(module);
    String(name);
    Op('\x93');
  } else {
    Op('c');
    out_.append(module).push_back('\n');
    out_.append(name).push_back('\n');
  }
  // The slot is known only now, because String above may have taken slots.
  it->second = Put();
}

// Put writes BINPUT or LONG_BINPUT, Get writes BINGET or LONG_BINGET. MEMOIZE would save a byte for
// each value, but protocol 2 does not have it.
std::uint32_t PickleWriter::Put() {
  if (slots_ <= 0xFF) {
    Op('q');
    Little(slots_, 1);
  } else {
    Op('r');
    Little(slots_, 4);
  }
  return slots_++;
}

void PickleWriter::Get(std::uint32_t slot) {
  if (slot <= 0xFF) {
    Op('h');
    Little(slot, 1);
  } else {
    Op('j');
    Little(slot, 4);
  }
}

void PickleWriter::Tuple(const Dims& values) {
  if (values.rank() == 0) {
    EmptyTuple();
    return;
  }
  // TUPLE1 to TUPLE3 take their items from the stack without a mark.
  if (values.rank() > 3) Mark();
  for (const std::int64_t value : values) Int(value);
  constexpr char kOps[] = {'\x85', '\x86', '\x87'};
  Op(values.rank() > 3 ? 't' : kOps[values.rank() - 1]);
}

void PickleWriter::Common(const CommonValue& value) {
  // Writes a MARK and the items; the caller then writes the opcode that takes them.
  const auto items = [this](const std::vector<CommonValue>& list) {
    Mark();
    for (const CommonValue& item : list) Common(item);
  };
  if (const auto* b = value.get_if<bool>()) {
    Bool(*b);
  } else if (const auto* i = value.get_if<std::int64_t>()) {
    Int(*i);
  } else if (const auto* u = value.get_if<std::uint64_t>()) {
    Unsigned(*u);
  } else if (const auto* f = value.get_if<double>()) {
    Float(*f);
  } else if (const auto* s = value.get_if<std::string>()) {
    String(*s);
  } else if (const auto* bytes = value.get_if<CommonBytes>()) {
    Bytes(bytes->data);
  } else if (const auto* list = value.get_if<CommonList>()) {
    EmptyList();
    items(list->items);
    Appends();
  } else if (const auto* tuple = value.get_if<CommonTuple>()) {
    if (tuple->items.empty()) {
      EmptyTuple();
    } else {
      items(tuple->items);
      TupleFromMark();
    }
  } else if (const auto* dict = value.get_if<CommonDict>()) {
    EmptyDict();
    Mark();
    for (const auto& [key, item] : dict->items) {
      if (const auto* number = std::get_if<std::int64_t>(&key)) {
        Int(*number);
      } else {
        String(std::get<std::string>(key));
      }
      Common(item);
    }
    SetItems();
  } else {
    None();
  }
}

// Writes the opcode STOP.
std::string PickleWriter::Finish() {
  Op('.');
  return std::move(out_);
}

}  // namespace tensormount::fs
