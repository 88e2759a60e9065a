// SPDX-License-Identifier: Apache-2.0
// pickle::Describe of pickle.h: a listing of a pickle for people, in which calls are marked as not
// called. It has a file of its own because no other code depends on the text form of values.
//
// The input may be hostile. Depth, lines and lengths are limited, texts are made printable, and a
// value that was shown before is not expanded again. The work is therefore linear in the size of
// the listing.
#include <charconv>
#include <unordered_set>

#include "index/archives/pickle_record.h"

namespace tensormount::pickle {
namespace {

constexpr std::size_t kMaxText = 80;        // Bytes of one text that are shown.
constexpr std::size_t kMaxShownDepth = 40;  // Deepest level that is shown.
constexpr std::size_t kMaxInline = 16;      // Most items of a tuple that is shown on one line.

std::string QuotedStart(std::string_view text) {
  return '"' + ShownName(text.substr(0, kMaxText)) + (text.size() > kMaxText ? "\"..." : "\"");
}

// Writes lines until max_lines.
class Describer {
 public:
  explicit Describer(std::size_t max_lines) : max_lines_(max_lines) {}

  std::string Run(const Value& root) {
    Show(root, 0, "");
    if (cut_) out_ += "...\n";
    return std::move(out_);
  }

 private:
  // Writes one line. Returns false if the limit of lines is reached.
  bool Line(std::size_t depth, const std::string& label, const std::string& text) {
    if (lines_ >= max_lines_) {
      cut_ = true;
      return false;
    }
    ++lines_;
    out_.append(2 * depth, ' ');
    out_ += label;
    out_ += text;
    out_ += '\n';
    return true;
  }

  // A value on one line; empty if it needs several lines. Tuples of scalars (sizes, offsets), the
  // most frequent values in metadata, fit on one line.
  std::string Short(const Value& v) {
    switch (v.kind()) {
      case Kind::kNone:
        return "None";
      case Kind::kBool:
        return v.boolean() ? "True" : "False";
      case Kind::kInt:
        return std::to_string(v.integer());
      case Kind::kLong:
        return "an integer of " + std::to_string(v.text().size()) + " bytes";
      case Kind::kFloat: {
        char text[32];
        const auto end = std::to_chars(text, text + sizeof(text), v.real()).ptr;
        return std::string(text, end);
      }
      case Kind::kString:
        return QuotedStart(v.text());
      case Kind::kBytes:
        return std::to_string(v.text().size()) + " bytes";
      case Kind::kGlobal:
        return NameOf(v);
      case Kind::kTuple: {
        if (v.size() > kMaxInline) return {};
        std::string out = "(";
        for (std::size_t i = 0; i < v.size(); ++i) {
          const Kind kind = v.item(i).kind();
          if (kind == Kind::kTuple || kind >= Kind::kList) return {};
          out += (i > 0 ? ", " : "") + Short(v.item(i));
        }
        return out + (v.size() == 1 ? ",)" : ")");
      }
      case Kind::kObject:
        if (v.Is(KnownClass::kTorchSize) && v.args().size() == 1 &&
            v.args().item(0).kind() == Kind::kTuple) {
          const std::string sizes = Short(v.args().item(0));
          if (!sizes.empty()) return "torch.Size" + sizes;
        }
        return {};
      default:
        return {};
    }
  }
  static std::string NameOf(const Value& global) {
    return ShownName(std::string(global.module()) + "." + std::string(global.name()));
  }

  void Show(const Value& v, std::size_t depth, const std::string& label) {
    if (const std::string text = Short(v); !text.empty()) {
      Line(depth, label, text);
      return;
    }
    const std::size_t n = v.kind() == Kind::kPersistent ? 1 : v.size();
    const bool record = v.kind() == Kind::kObject;
    std::string what;
    switch (v.kind()) {
      case Kind::kTuple:
        what = "tuple of ";
        break;
      case Kind::kList:
        what = "list of ";
        break;
      case Kind::kSet:
        what = "set of ";
        break;
      case Kind::kDict:
        what = "dict of ";
        break;
      default:
        break;
    }
    if (record) {
      what = NameOf(v.callee()) + " (not called)";
    } else if (v.kind() == Kind::kPersistent) {
      what = "persistent";
    } else {
      what += std::to_string(n);
    }
    // Each container or object that is shown on several lines is one record in the arena,
    // identified by its address. This also ends cycles.
    const bool again = !shown_.insert(Access::PointerTo<const void>(v)).second;
    if (!Line(depth, label, what + (again ? ", shown above" : "")) || again) return;
    if (depth >= kMaxShownDepth) {
      Line(depth + 1, "", "...");
      return;
    }
    if (v.kind() == Kind::kPersistent) {
      Show(v.args(), depth + 1, "");
      return;
    }
    if (record) {
      const Value args = v.args();
      for (std::size_t i = 0; i < args.size() && !cut_; ++i) {
        Show(args.item(i), depth + 1, "argument: ");
      }
      if (v.state().kind() != Kind::kNone) Show(v.state(), depth + 1, "state: ");
    }
    for (std::size_t i = 0; i < n && !cut_; ++i) {
      std::string key;
      if (v.kind() == Kind::kDict || record) {
        const Value k = v.key(i);
        key = Short(k);
        if (key.empty()) {
          Show(k, depth + 1, "key: ");
          key = "value";
        }
        key += ": ";
      }
      Show(v.item(i), depth + 1, key);
    }
  }

  const std::size_t max_lines_;
  std::size_t lines_ = 0;
  bool cut_ = false;
  std::string out_;
  std::unordered_set<const void*> shown_;
};

}  // namespace

std::string Describe(const Document& document, std::size_t max_lines) {
  return Describer(max_lines).Run(document.root());
}

}  // namespace tensormount::pickle
