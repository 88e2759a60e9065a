// SPDX-License-Identifier: Apache-2.0
// Terms of rules with numbers for names, and how boxes of a tensor become boxes over the names. The
// digits of an axis are a mixed radix: cells that follow each other on the axis have indices that
// follow each other in row-major order. So a range of an axis is a flat range of its digits, and a
// flat range is a few boxes (Region::Flat).
#include "shard/cell_map.h"

#include <algorithm>

#include "shard/box_access.h"

namespace tensormount {
namespace {

using Digit = TermSide::Digit;

// How many cells of an axis with these digits are before coordinate `end`, which is relative to the
// axis's first cell of the term.
std::int64_t CellsBefore(std::span<const Digit> digits, std::int64_t end) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    const Digit& digit = digits[i];
    if (end <= 0)
      return before * [&] {
        std::int64_t rest = 1;
        for (std::size_t j = i; j < digits.size(); ++j) rest *= digits[j].size;
        return rest;
      }();
    // The last digit counts the cell at which a step begins; a slower one leaves it to the next.
    const bool last = i + 1 == digits.size();
    const std::int64_t steps = last ? (end - 1) / digit.step + 1 : end / digit.step;
    const std::int64_t full = std::min(steps, digit.size);
    before = before * digit.size + full;
    if (full == digit.size) {
      for (std::size_t j = i + 1; j < digits.size(); ++j) before *= digits[j].size;
      return before;
    }
    end -= full * digit.step;
  }
  return before;
}

// Numbers names, and gives the merged ones the same number.
class Numbering {
 public:
  int Of(const std::string& name) {
    const auto it = std::find(names_.begin(), names_.end(), name);
    if (it != names_.end()) return static_cast<int>(it - names_.begin());
    names_.push_back(name);
    return static_cast<int>(names_.size()) - 1;
  }

 private:
  std::vector<std::string> names_;
};

TermSide Numbered(const AxisTerm& term, std::span<const std::string> key, Numbering& numbers) {
  TermSide side;
  for (const std::string& name : key) side.in_key.push_back(numbers.Of(name));
  for (const AxisTerm::Digit& digit : term.digits) {
    side.digits.push_back({numbers.Of(digit.name), digit.axis, digit.size, digit.step});
  }
  side.begin = term.begin;
  return side;
}

// The position of the digit that directly follows digit `i` on its axis, without a gap; npos if
// none does.
std::size_t Follower(const TermSide& side, std::size_t i) {
  const std::vector<Digit>& digits = side.digits;
  const bool follows = i + 1 < digits.size() && digits[i + 1].axis == digits[i].axis &&
                       digits[i].step == digits[i + 1].size * digits[i + 1].step;
  return follows ? i + 1 : std::string::npos;
}

std::size_t DigitOf(const TermSide& side, int name) {
  const auto it = std::find_if(side.digits.begin(), side.digits.end(),
                               [&](const Digit& digit) { return digit.name == name; });
  return it == side.digits.end() ? std::string::npos
                                 : static_cast<std::size_t>(it - side.digits.begin());
}

// Joins digit `i` with its follower, which keeps its step and its name.
void Join(TermSide& side, std::size_t i) {
  side.digits[i + 1].size *= side.digits[i].size;
  side.digits.erase(side.digits.begin() + static_cast<std::ptrdiff_t>(i));
}

// Joins names that follow each other directly on both sides.
void JoinNeighbours(TermSide& to, TermSide* from) {
  for (std::size_t i = 0; i < to.digits.size();) {
    const std::size_t next = Follower(to, i);
    bool join = next != std::string::npos;
    if (join && from != nullptr) {
      const std::size_t there = DigitOf(*from, to.digits[i].name);
      join = there != std::string::npos;
      const std::size_t after = join ? Follower(*from, there) : std::string::npos;
      join = after != std::string::npos && from->digits[after].name == to.digits[next].name;
      if (join) Join(*from, there);
    }
    if (join) {
      Join(to, i);
    } else {
      ++i;
    }
  }
}

void Renumber(TermSide& side, std::span<const int> number) {
  for (Digit& digit : side.digits) digit.name = number[static_cast<std::size_t>(digit.name)];
  for (int& name : side.in_key) name = number[static_cast<std::size_t>(name)];
}

}  // namespace

void TermSide::Fold(const PlacedBox& native, std::span<const std::int64_t> key, int names,
                    std::vector<PlacedBox>& out) const {
  const int rank = begin.rank();
  // Begins with one box that takes all names of the key and the bytes of an element; every axis
  // then multiplies the boxes by the ranges of its digits.
  PlacedBox first;
  Dims box_begin = Dims::Filled(names + 1, 0);
  Dims box_extent = Dims::Filled(names + 1, 1);
  first.strides = Dims::Filled(names + 1, 0);
  first.offset = native.offset;
  for (std::size_t i = 0; i < in_key.size(); ++i) box_begin[in_key[i]] = key[i];
  box_begin[names] = native.box.begin(rank);
  box_extent[names] = native.box.extent(rank);
  first.strides[names] = native.strides[rank];
  for (const Digit& digit : digits) {
    // A digit of one cell has no neighbours, and its step may be any number.
    if (digit.size > 1) first.strides[digit.name] = native.strides[digit.axis] * digit.step;
  }
  first.box = BoxAccess::Make(box_begin, box_extent);
  std::vector<PlacedBox> boxes = {std::move(first)};

  std::size_t digit = 0;
  for (int axis = 0; axis < rank; ++axis) {
    const std::size_t from = digit;
    Dims sizes;
    while (digit < digits.size() && digits[digit].axis == axis) {
      sizes.push_back(digits[digit++].size);
    }
    const std::span<const Digit> here(digits.data() + from, digit - from);
    const std::int64_t low = native.box.begin(axis) - begin[axis];
    const std::int64_t high = native.box.end(axis) - begin[axis];
    if (here.empty()) {
      if (low > 0 || high <= 0) return;
      for (PlacedBox& box : boxes) box.offset -= low * native.strides[axis];
      continue;
    }
    const std::int64_t before = CellsBefore(here, low);
    const std::int64_t count = CellsBefore(here, high) - before;
    if (count <= 0) return;
    const std::vector<Box> ranges = Region::Flat(Box::Whole(sizes), before, count).value().Boxes();
    std::vector<PlacedBox> more;
    more.reserve(boxes.size() * ranges.size());
    for (const PlacedBox& box : boxes) {
      for (const Box& range : ranges) {
        PlacedBox& cut = more.emplace_back(box);
        std::int64_t at = -low;
        for (std::size_t i = 0; i < here.size(); ++i) {
          const int a = static_cast<int>(i);
          at += range.begin(a) * here[i].step;
          cut.box = BoxAccess::WithAxis(cut.box, here[i].name, range.begin(a), range.extent(a));
        }
        cut.offset += at * native.strides[axis];
      }
    }
    boxes = std::move(more);
  }
  out.insert(out.end(), std::make_move_iterator(boxes.begin()),
             std::make_move_iterator(boxes.end()));
}

Box TermSide::Unfold(const Box& box) const {
  const int rank = begin.rank();
  const int bytes = box.rank() - 1;
  Dims first = begin;
  Dims last = begin;
  for (const Digit& digit : digits) {
    first[digit.axis] += box.begin(digit.name) * digit.step;
    last[digit.axis] += (box.end(digit.name) - 1) * digit.step;
  }
  Dims extent;
  for (int a = 0; a < rank; ++a) extent.push_back(last[a] - first[a] + 1);
  first.push_back(box.begin(bytes));
  extent.push_back(box.extent(bytes));
  return BoxAccess::Make(first, extent);
}

Status TermSide::Place(const PlacedBox& folded, std::vector<PlacedBox>& out) const {
  // A run of neighbouring cells of an axis, with one distance in memory.
  struct Run {
    std::int64_t begin = 0;
    std::int64_t extent = 1;
    std::int64_t stride = 0;
    std::int64_t offset = 0;
  };
  const Status too_many(Code::kResourceExhausted, "a read through two name maps has more than " +
                                                      std::to_string(kMaxPlaced) +
                                                      " separate parts");
  const int rank = begin.rank();
  const int bytes = folded.box.rank() - 1;
  std::vector<PlacedBox> boxes(1);
  boxes[0].offset = folded.offset;
  Dims first = Dims::Filled(rank + 1, 0);
  Dims extent = Dims::Filled(rank + 1, 1);
  boxes[0].strides = Dims::Filled(rank + 1, 0);
  first[rank] = folded.box.begin(bytes);
  extent[rank] = folded.box.extent(bytes);
  boxes[0].strides[rank] = folded.strides[bytes];
  boxes[0].box = BoxAccess::Make(first, extent);

  std::size_t end = digits.size();
  for (int axis = rank; axis-- > 0;) {
    std::vector<Run> runs = {{.begin = begin[axis]}};
    // The fastest digit first: `full` cells of it and of those after it follow each other.
    std::int64_t full = 1;
    for (; end > 0 && digits[end - 1].axis == axis; --end) {
      const Digit& digit = digits[end - 1];
      const std::int64_t low = folded.box.begin(digit.name);
      const std::int64_t count = folded.box.extent(digit.name);
      const std::int64_t stride = folded.strides[digit.name];
      const Run one = runs[0];
      const bool joins = runs.size() == 1 && one.extent == full && digit.step == full &&
                         (full == 1 || stride == one.stride * full);
      if (digit.size > 1) full = digit.step * digit.size;
      if (joins) {
        runs[0] = {.begin = one.begin + low * digit.step,
                   .extent = one.extent * count,
                   .stride = one.extent == 1 ? stride : one.stride,
                   .offset = one.offset};
        continue;
      }
      if (static_cast<std::uint64_t>(count) > kMaxPlaced / runs.size()) return too_many;
      std::vector<Run> more;
      more.reserve(runs.size() * static_cast<std::size_t>(count));
      for (std::int64_t i = 0; i < count; ++i) {
        for (Run run : runs) {
          run.begin += (low + i) * digit.step;
          run.offset += i * stride;
          more.push_back(run);
        }
      }
      runs = std::move(more);
    }
    if (runs.size() > (kMaxPlaced - std::min(out.size(), kMaxPlaced)) / boxes.size()) {
      return too_many;
    }
    std::vector<PlacedBox> more;
    more.reserve(boxes.size() * runs.size());
    for (const PlacedBox& box : boxes) {
      for (const Run& run : runs) {
        PlacedBox& cut = more.emplace_back(box);
        cut.box = BoxAccess::WithAxis(cut.box, axis, run.begin, run.extent);
        cut.strides[axis] = run.stride;
        cut.offset += run.offset;
      }
    }
    boxes = std::move(more);
  }
  out.insert(out.end(), std::make_move_iterator(boxes.begin()),
             std::make_move_iterator(boxes.end()));
  return Status();
}

Result<CellTerm> CellTerm::Make(const AxisTerm& to, std::span<const std::string> to_key,
                                const AxisTerm* from, std::span<const std::string> from_key,
                                std::uint32_t source, const AxisSizes& sizes) {
  Numbering numbers;
  CellTerm term;
  term.source = source;
  term.to = Numbered(to, to_key, numbers);
  if (from != nullptr) term.from = Numbered(*from, from_key, numbers);
  JoinNeighbours(term.to, term.from ? &*term.from : nullptr);

  // The names that are left, in the order of the mapped tensor.
  std::vector<int> number(to_key.size() + to.digits.size() + from_key.size() +
                              (from != nullptr ? from->digits.size() : 0),
                          -1);
  int names = 0;
  const auto add = [&](int name, std::int64_t extent) -> Status {
    if (names == kMaxRank) {
      return Status(Code::kUnsupported, "a term of a rule has more than " +
                                            std::to_string(kMaxRank) +
                                            " names that are not neighbours on both sides");
    }
    number[static_cast<std::size_t>(name)] = names++;
    term.extents.push_back(extent);
    return Status();
  };
  for (std::size_t i = 0; i < to_key.size(); ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(add(term.to.in_key[i], sizes.find(to_key[i])->second));
  }
  for (const Digit& digit : term.to.digits) {
    TENSORMOUNT_RETURN_IF_ERROR(add(digit.name, digit.size));
  }
  Renumber(term.to, number);
  if (term.from) Renumber(*term.from, number);
  return term;
}

bool CellTerm::IsIdentity() const {
  if (!from || !to.in_key.empty() || !from->in_key.empty() || !(to.begin == from->begin)) {
    return false;
  }
  return std::equal(to.digits.begin(), to.digits.end(), from->digits.begin(), from->digits.end(),
                    [](const Digit& a, const Digit& b) {
                      return a.name == b.name && a.axis == b.axis && a.size == b.size &&
                             a.step == b.step;
                    });
}

}  // namespace tensormount
