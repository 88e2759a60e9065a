// SPDX-License-Identifier: Apache-2.0
#include "fs/views/key_path.h"

#include <algorithm>
#include <map>
#include <set>

#include "fs/views/key_tree.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount::fs {
namespace {

TEST(KeyPath, PlainKeysArePathsUnchanged) {
  for (const char* key :
       {"w", "layers.0.attention.weight", "a/b/c", "model/layer:0/w", "x y", "ä"}) {
    EXPECT_EQ(PathOfKey(key, false), key);
  }
}

TEST(KeyPath, DocumentedEscapesAreApplied) {
  EXPECT_EQ(PathOfKey("a@b", false), "a%40b");
  EXPECT_EQ(PathOfKey("50%", false), "50%25");
  EXPECT_EQ(PathOfKey("..", false), "%2E%2E");
  EXPECT_EQ(PathOfKey("a/./b", false), "a/%2E/b");
  EXPECT_EQ(PathOfKey("a//b/", false), "a/%-/b/%-");
  EXPECT_EQ(PathOfKey("w.npy", false), "w%2Enpy");
  EXPECT_EQ(PathOfKey("w.npy/x", false), "w%2Enpy/x");
  EXPECT_EQ(PathOfKey("w.json", false), "w.json");
  EXPECT_EQ(PathOfKey("w.json/x", false), "w%2Ejson/x");
  EXPECT_EQ(PathOfKey("w[0]", false), "w[0%5D");
  EXPECT_EQ(PathOfKey("w[0]x", false), "w[0]x");
  EXPECT_EQ(PathOfKey("a", true), "a%=");
  EXPECT_EQ(PathOfKey(std::string(300, 'k'), false),
            "%+" + std::string(240, 'k') + "/" + std::string(60, 'k'));
  EXPECT_EQ(PathOfKey(std::string(240, 'k'), false), std::string(240, 'k'));
}

TEST(KeyPath, NonCanonicalPathsAreNotFound) {
  for (const char* path :
       {"",   "a//b", "/a",    "a/",    "%41", "%2e", "%",   "%4", "%%",    "a/..", ".",
        "%+", "%+a",  "%+a/b", "a%=/b", "%=",  "x%-", "%-x", "@",  "a.npy", "b]"}) {
    EXPECT_THAT(KeyOfPath(path), HasCode(Code::kNotFound)) << path;
  }
}

// Keys made of what is special, so that collisions are likely.
std::string RandomKey(Random& random) {
  static const std::vector<std::string> kPieces = {"a",
                                                   "b",
                                                   "/",
                                                   "/",
                                                   ".",
                                                   "..",
                                                   "%",
                                                   "@",
                                                   "[",
                                                   "]",
                                                   ".npy",
                                                   ".json",
                                                   "%-",
                                                   "%+",
                                                   "%=",
                                                   "%2E",
                                                   "-",
                                                   "0",
                                                   "\xC3\xBC",
                                                   "\xE2\x82\xAC",
                                                   "\n",
                                                   std::string(120, 'l'),
                                                   std::string(239, 'm')};
  std::string key;
  const int pieces = static_cast<int>(random.Int(1, 6));
  for (int i = 0; i < pieces; ++i) key += random.Pick(kPieces);
  return key;
}

TEST(KeyPath, RandomKeysRoundTripAsValidPaths) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(20000); ++i) {
    const std::string key = RandomKey(random);
    const bool also_folder = random.OneIn(4);
    const std::string path = PathOfKey(key, also_folder);
    std::size_t begin = 0;
    while (begin <= path.size()) {
      const std::size_t slash = std::min(path.find('/', begin), path.size());
      const std::string name = path.substr(begin, slash - begin);
      ASSERT_FALSE(name.empty() || name == "." || name == "..") << key;
      ASSERT_LE(name.size() + 5, 255u) << key;
      ASSERT_EQ(name.find('\0'), std::string::npos);
      begin = slash + 1;
    }
    ASSERT_THAT(KeyOfPath(path), IsOkAndHolds(key)) << path;
  }
}

// All files below a folder of the tree, as path -> ordinal, looking each one up on the way.
void WalkTree(const KeyTree& tree, const TreeFolder& folder, const std::string& prefix, int page,
              std::map<std::string, std::uint32_t>& files) {
  std::uint64_t from = 0;
  std::vector<TreeChild> children;
  for (bool more = true; more;) {
    more = false;
    int taken = 0;
    ASSERT_OK(tree.List(folder, from, [&](TreeChild& child, std::uint64_t next) {
      if (taken == page) {
        more = true;
        return false;
      }
      ++taken;
      from = next;
      children.push_back(child);
      return true;
    }));
  }
  std::set<std::string> names;
  for (const TreeChild& child : children) {
    ASSERT_TRUE(names.insert(child.name).second) << prefix << child.name << " twice";
    ASSERT_OK_AND_ASSIGN(const TreeChild found, tree.Lookup(folder, child.name));
    EXPECT_EQ(found.is_folder, child.is_folder);
    EXPECT_EQ(found.ordinal, child.ordinal);
    EXPECT_EQ(found.depth, child.depth);
    const std::string path = prefix + child.name;
    EXPECT_THAT(tree.PathOf(child.ordinal, child.is_folder ? child.depth : 0), IsOkAndHolds(path));
    if (child.is_folder) {
      WalkTree(tree, {.first = child.ordinal, .depth = child.depth}, path + "/", page, files);
    } else {
      ASSERT_TRUE(files.emplace(path, child.ordinal).second);
    }
  }
}

TEST(KeyTree, ListsEveryKeyOnceUnderItsPath) {
  Random random(TestSeed() + 1);
  for (int round = 0; round < TestScale(300); ++round) {
    std::set<std::string> keys;
    const auto count = random.Int(0, 60);
    for (int i = 0; i < count; ++i) keys.insert(RandomKey(random));
    const ListedKeys source(std::vector<std::string>(keys.begin(), keys.end()));
    const KeyTree tree(source);
    std::map<std::string, std::uint32_t> expected;
    std::uint32_t ordinal = 0;
    for (const std::string& key : keys) {
      const auto below = keys.lower_bound(key + "/");
      const bool also_folder = below != keys.end() && below->starts_with(key + "/");
      expected.emplace(PathOfKey(key, also_folder), ordinal++);
    }
    ASSERT_EQ(expected.size(), keys.size());  // No two keys share a path.
    std::map<std::string, std::uint32_t> files;
    WalkTree(tree, {}, "", static_cast<int>(random.Int(1, 8)), files);
    ASSERT_EQ(files, expected) << "round " << round;
  }
}

TEST(KeyTree, LookupOfMissingNamesIsNotFound) {
  const ListedKeys source({"a", "a/b", "c/d"});
  const KeyTree tree(source);
  for (const char* name : {"b", "a%", "c%=", "d", "%-", "%+a", "", "..", "%61", "a/b"}) {
    EXPECT_THAT(tree.Lookup({}, name), HasCode(Code::kNotFound)) << name;
  }
  ASSERT_OK_AND_ASSIGN(const TreeChild file, tree.Lookup({}, "a%="));
  EXPECT_FALSE(file.is_folder);
  ASSERT_OK_AND_ASSIGN(const TreeChild folder, tree.Lookup({}, "a"));
  EXPECT_TRUE(folder.is_folder);
}

}  // namespace
}  // namespace tensormount::fs
