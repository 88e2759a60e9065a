// SPDX-License-Identifier: Apache-2.0
#include "index/store/store.h"

#include <atomic>
#include <set>
#include <thread>
#include <unistd.h>

#include "index/records/manifest.h"
#include "tests/index/store_test_support.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

TEST_F(StoreTest, DirectoryWithoutSuperblockIsNotAStore) {
  EXPECT_THAT(Store::Open(fs(), StorePath()), HasCode(Code::kNotFound));
  EXPECT_THAT(Store::Open(fs(), dir_.path()), HasMessage("not a store"));
}

TEST_F(StoreTest, OpeningAgainGivesTheSameUuid) {
  const Store made = MakeStore();
  const auto again = Store::OpenOrCreate(fs(), StorePath());
  const auto opened = Store::Open(fs(), StorePath());
  ASSERT_OK(again);
  ASSERT_OK(opened);
  EXPECT_FALSE(made.uuid().IsZero());
  EXPECT_EQ(again.value().uuid(), made.uuid());
  EXPECT_EQ(opened.value().uuid(), made.uuid());
  EXPECT_THAT(NamesIn(StorePath()), ElementsAre("store.json"));
}

// Otherwise a save to /dev/null would leave /dev as an empty store.
TEST_F(StoreTest, ASaveToATakenNameDoesNotMakeItsFolderAStore) {
  const std::string folder = dir_.Join("folder");
  ASSERT_OK(fs().CreateDirectory(folder));
  ASSERT_OK(fs().WriteFileDurably(folder + "/taken", "text"));
  ASSERT_OK(fs().CreateDirectory(folder + "/empty"));
  EXPECT_THAT(Store::OpenOrCreate(fs(), folder, "taken"), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(Store::OpenOrCreate(fs(), folder, "latest"), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(NamesIn(folder), testing::UnorderedElementsAre("taken", "empty"));
  EXPECT_OK(Store::OpenOrCreate(fs(), folder, "empty"));
  // In a store, Store::Begin decides, because it knows whether a checkpoint has the name.
  EXPECT_OK(Store::OpenOrCreate(fs(), folder, "taken"));
}

TEST_F(StoreTest, CreatesMissingParentsAndFollowsSymlinks) {
  ASSERT_OK(fs().CreateDirectory(dir_.Join("real")));
  ASSERT_EQ(symlink(dir_.Join("real").c_str(), dir_.Join("link").c_str()), 0);
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(WriteTinyCheckpoint(fs(), dir_.Join("link/a/b//store/"), "step-1", spec));
  EXPECT_TRUE(HoldsWhole(dir_.Join("real/a/b/store/step-1"), spec));
  // The store itself is a link.
  ASSERT_EQ(symlink(dir_.Join("real/a/b/store").c_str(), dir_.Join("s").c_str()), 0);
  ASSERT_OK(WriteTinyCheckpoint(fs(), dir_.Join("s"), "step-2", spec));
  EXPECT_TRUE(HoldsWhole(dir_.Join("real/a/b/store/step-2"), spec));
}

// What a store needs is asked before anything is made.
TEST_F(StoreTest, StoreNeedsAWritableFileSystemWithNoReplace) {
  class Lacking : public ObservedFileSystem {
   public:
    Lacking(FileSystem& base, Ability what) : ObservedFileSystem(base, {}), what_(what) {}
    std::string_view name() const override { return "the lacking one"; }
    bool Can(Ability ability) const override { return ability != what_; }

   private:
    const Ability what_;
  };
  Lacking sealed(fs(), Ability::kWrite);
  const auto read_only = Store::OpenOrCreate(sealed, StorePath());
  EXPECT_THAT(read_only, HasCode(Code::kReadOnly));
  EXPECT_THAT(read_only, HasMessage(StorePath() + ": the lacking one is read-only"));
  Lacking replacing(fs(), Ability::kRenameNoReplace);
  const auto replaces = Store::OpenOrCreate(replacing, StorePath());
  EXPECT_THAT(replaces, HasCode(Code::kUnsupported));
  EXPECT_THAT(replaces, HasMessage("the lacking one does not support renaming without replacing"));
  EXPECT_FALSE(fs().Exists(StorePath()));
  Lacking unlocked(fs(), Ability::kLocks);
  EXPECT_OK(Store::OpenOrCreate(unlocked, StorePath()));
}

TEST_F(StoreTest, ConcurrentCreatorsAgree) {
  std::vector<Uuid> uuids(8);
  {
    std::vector<std::jthread> threads;
    for (Uuid& uuid : uuids) {
      threads.emplace_back([&] {
        const auto store = Store::OpenOrCreate(fs(), dir_.Join("x/y/store"));
        if (store.ok()) uuid = store.value().uuid();
      });
    }
  }
  EXPECT_EQ(std::set<Uuid>(uuids.begin(), uuids.end()).size(), 1u);
  EXPECT_FALSE(uuids[0].IsZero());
  EXPECT_THAT(NamesIn(dir_.Join("x/y/store")), ElementsAre("store.json"));
}

TEST_F(StoreTest, StoreCreatedConcurrentlyIsUsed) {
  ASSERT_OK(fs().CreateDirectory(StorePath()));
  // Between the looks of one who makes it, at every one of them.
  for (int look = 0;; ++look) {
    int looks = 0;
    Uuid theirs;
    ObservedFileSystem racing(fs(), [&](const FileEvent& e) {
      if (e.op == FileOp::kStat && looks++ == look) theirs = MakeStore().uuid();
      return Status();
    });
    const auto store = Store::OpenOrCreate(racing, StorePath());
    ASSERT_OK(store) << "look " << look;
    if (looks <= look) break;
    EXPECT_EQ(store.value().uuid(), theirs);
    ASSERT_OK(fs().RemoveFile(InStore("store.json")));
  }
}

class SuperblockTest : public StoreTest {
 protected:
  Result<Store> OpenWith(const std::string& from, const std::string& to) {
    const std::string path = InStore("store.json");
    if (fs().Exists(path)) {
      EXPECT_OK(fs().RemoveFile(path));
    }
    MakeStore();
    std::string text = ReadWholeFile(path);
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << text;
    text.replace(at, from.size(), to);
    WriteWholeFile(path, text);
    return Store::Open(fs(), StorePath());
  }
};

TEST_F(SuperblockTest, UnknownIncompatibleBitsAreRefusedByName) {
  const auto store = OpenWith("\"incompatible\": 0", "\"incompatible\": 20");
  EXPECT_THAT(store, HasCode(Code::kUnsupported));
  EXPECT_THAT(store, HasMessage("incompatible feature bits 0x14"));
}

TEST_F(SuperblockTest, UnknownReadCompatibleBitsMakeTheStoreReadOnly) {
  const auto store = OpenWith("\"read_compatible\": 0", "\"read_compatible\": 2");
  ASSERT_OK(store);
  EXPECT_OK(store.value().List());
  EXPECT_THAT(store.value().Begin("a", IfExists::kFail), HasCode(Code::kReadOnly));
  EXPECT_THAT(store.value().Remove("a"), HasCode(Code::kReadOnly));
  EXPECT_THAT(store.value().Gc({}), HasCode(Code::kReadOnly));
}

TEST_F(SuperblockTest, UnknownCompatibleBitsAndFieldsAreIgnored) {
  EXPECT_OK(OpenWith("\"compatible\": 0", "\"news\": [1], \"compatible\": 9"));
}

TEST_F(SuperblockTest, ANewerVersionIsRefused) {
  EXPECT_THAT(OpenWith("\"version\": 1", "\"version\": 2"), HasCode(Code::kUnsupported));
}

TEST_F(SuperblockTest, ErrorNamesTheDamage) {
  EXPECT_THAT(OpenWith("{", "["), HasCode(Code::kDataLoss));
  EXPECT_THAT(OpenWith("tensormount-store", "tensormount-stope"), HasCode(Code::kDataLoss));
  EXPECT_THAT(OpenWith("\"incompatible\": 0", "\"incompatible\": -1"), HasCode(Code::kDataLoss));
  EXPECT_THAT(OpenWith("\"uuid\": \"", "\"uuid\": \"z"), HasMessage("uuid"));
}

TEST_F(StoreTest, NamesThatCannotBeCheckpointsAreRefused) {
  const Store store = MakeStore();
  for (const std::string& name :
       {std::string(), std::string("latest"), std::string("store.json"), std::string(".x"),
        std::string("."), std::string(".."), std::string("a/b"), std::string("a\0b", 3),
        std::string(256, 'a')}) {
    EXPECT_THAT(CheckCheckpointName(name), HasCode(Code::kInvalidArgument)) << name;
    EXPECT_THAT(store.Begin(name, IfExists::kFail), HasCode(Code::kInvalidArgument)) << name;
    EXPECT_THAT(store.Remove(name), HasCode(Code::kInvalidArgument)) << name;
  }
  const TinySpec spec = DefaultTinySpec();
  EXPECT_OK(Save(std::string(255, 'n'), spec));
  EXPECT_TRUE(HoldsWhole(InStore(std::string(255, 'n')), spec));
}

TEST_F(StoreTest, PublishedCheckpointIsListedAndWhole) {
  const TinySpec spec = DefaultTinySpec();
  const auto first = Save("step-1", spec);
  ASSERT_OK(first);
  EXPECT_EQ(first.value().tensors, spec.tensors.size());
  EXPECT_EQ(first.value().chunks, 8u);
  EXPECT_TRUE(HoldsWhole(InStore("step-1"), spec));
  EXPECT_THAT(NamesIn(InStore("step-1")), ElementsAre("COMMIT", "data", "index", "manifest"));
  EXPECT_THAT(NamesIn(InStore(".staging")), IsEmpty());
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  EXPECT_EQ(first.value().info.world_size, 2u);
  EXPECT_EQ(first.value().info.producer, "tiny");

  const auto second = Save("step-2", DefaultTinySpec(9));
  ASSERT_OK(second);
  EXPECT_GT(second.value().info.generation, first.value().info.generation);
  EXPECT_EQ(second.value().info.parent, first.value().info.uuid);
  EXPECT_EQ(second.value().info.parent_name, "step-1");
  const Store store = MakeStore();
  const auto list = store.List();
  ASSERT_OK(list);
  ASSERT_THAT(list.value(), SizeIs(2));
  EXPECT_EQ(list.value()[1].name, "step-2");
  EXPECT_EQ(list.value()[1].uuid, second.value().info.uuid);
  EXPECT_EQ(list.value()[1].parent, first.value().info.uuid);
  EXPECT_EQ(store.Latest().value().name, "step-2");
}

TEST_F(StoreTest, LatestIsTheHighestGeneration) {
  EXPECT_THAT(MakeStore().Latest(), HasCode(Code::kNotFound));
  ASSERT_OK(Save("z", DefaultTinySpec()));
  ASSERT_OK(Save("a", DefaultTinySpec()));
  EXPECT_EQ(MakeStore().Latest().value().name, "a");
}

TEST_F(StoreTest, DamagedCheckpointIsListedAndLatestSkipsIt) {
  ASSERT_OK(Save("good", DefaultTinySpec()));
  ASSERT_OK(Save("bad", DefaultTinySpec()));
  WriteWholeFile(InStore("bad/COMMIT"), "nonsense");
  ASSERT_OK(fs().CreateDirectory(InStore("folder")));
  const Store store = MakeStore();
  const auto list = store.List();
  ASSERT_OK(list);
  ASSERT_THAT(list.value(), SizeIs(3));
  EXPECT_THAT(list.value()[0].problem, HasCode(Code::kDataLoss));
  EXPECT_THAT(list.value()[1].problem, HasMessage("no COMMIT"));
  EXPECT_OK(list.value()[2].problem);
  EXPECT_EQ(store.Latest().value().name, "good");
  // Its generation is not given again.
  const auto next = Save("next", DefaultTinySpec());
  ASSERT_OK(next);
  EXPECT_EQ(next.value().info.generation, 3u);
}

TEST_F(StoreTest, TakenNameIsRefusedAtBeginAndAtPublish) {
  const Store store = MakeStore();
  const TinySpec mine = DefaultTinySpec(5);
  const Staging late = Written(store, "step", mine);
  const TinySpec theirs = DefaultTinySpec(6);
  ASSERT_OK(Save("step", theirs));
  EXPECT_THAT(store.Begin("step", IfExists::kFail), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(store.Publish(late, TinyCoordinator(mine), {}), HasCode(Code::kAlreadyExists));
  EXPECT_TRUE(HoldsWhole(InStore("step"), theirs));
  // The staging is as it was: it can still replace.
  EXPECT_OK(store.Publish(late, TinyCoordinator(mine), {.if_exists = IfExists::kReplace}));
  EXPECT_TRUE(HoldsWhole(InStore("step"), mine));
}

TEST_F(StoreTest, ConcurrentPublishersOfOneNameHaveOneWinner) {
  const Store store = MakeStore();
  constexpr int kPublishers = 6;
  std::vector<TinySpec> specs;
  std::vector<Staging> stagings;
  for (int i = 0; i < kPublishers; ++i) {
    specs.push_back(DefaultTinySpec(static_cast<std::uint64_t>(100 * i)));
    stagings.push_back(Written(store, "step", specs.back()));
  }
  std::vector<Code> codes(kPublishers);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < stagings.size(); ++i) {
      threads.emplace_back([&, i] {
        codes[i] = store.Publish(stagings[i], TinyCoordinator(specs[i]), {}).status().code();
      });
    }
  }
  int winner = -1;
  for (int i = 0; i < kPublishers; ++i) {
    if (codes[static_cast<std::size_t>(i)] == Code::kOk) {
      EXPECT_EQ(winner, -1) << "two winners";
      winner = i;
    } else {
      EXPECT_EQ(codes[static_cast<std::size_t>(i)], Code::kAlreadyExists);
    }
  }
  ASSERT_GE(winner, 0);
  EXPECT_TRUE(HoldsWhole(InStore("step"), specs[static_cast<std::size_t>(winner)]));
}

TEST_F(StoreTest, ConcurrentSavesClaimDifferentGenerationsDuringGc) {
  const Store store = MakeStore();
  std::mutex mutex;
  std::set<std::uint64_t> generations;
  std::atomic<int> begun = 0;
  {
    std::atomic<bool> stop = false;
    std::jthread gc([&] {
      while (!stop) EXPECT_OK(store.Gc({}));
    });
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 10; ++i) {
          const auto s = store.Begin("s" + std::to_string(t * 100 + i), IfExists::kFail);
          EXPECT_OK(s);
          if (!s.ok()) return;
          ++begun;
          const std::lock_guard lock(mutex);
          generations.insert(s.value().generation);
        }
      });
    }
    threads.clear();
    stop = true;
  }
  EXPECT_EQ(begun, 40);
  EXPECT_THAT(generations, SizeIs(40));
}

TEST_F(StoreTest, NewGenerationExceedsEveryCommittedOne) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ASSERT_OK(Save("b", DefaultTinySpec()));
  ASSERT_OK(fs().RemoveTree(InStore(".generations")));
  const auto staging = MakeStore().Begin("c", IfExists::kFail);
  ASSERT_OK(staging);
  EXPECT_EQ(staging.value().generation, 3u);
}

TEST_F(StoreTest, ReplacedCheckpointIsExchangedAndMovedToTrash) {
  const TinySpec old_spec = DefaultTinySpec(1);
  const auto old = Save("step", old_spec);
  ASSERT_OK(old);
  const TinySpec new_spec = DefaultTinySpec(2);
  ASSERT_OK(Save("step", new_spec, {.if_exists = IfExists::kReplace}));
  EXPECT_TRUE(HoldsWhole(InStore("step"), new_spec));
  EXPECT_THAT(NamesIn(InStore(".staging")), IsEmpty());
  EXPECT_TRUE(HoldsWhole(InStore(".trash/" + old.value().info.uuid.ToString()), old_spec));
  // Nothing there to replace: an ordinary publish.
  ASSERT_OK(Save("other", old_spec, {.if_exists = IfExists::kReplace}));
  EXPECT_TRUE(HoldsWhole(InStore("other"), old_spec));
}

TEST_F(StoreTest, NonCheckpointDirectoryIsNotReplacedOrRemoved) {
  const Store store = MakeStore();
  ASSERT_OK(fs().CreateDirectory(InStore("mine")));
  WriteWholeFile(InStore("mine/notes"), "precious");
  EXPECT_THAT(Save("mine", DefaultTinySpec(), {.if_exists = IfExists::kReplace}),
              HasCode(Code::kAlreadyExists));
  EXPECT_THAT(store.Remove("mine"), HasCode(Code::kInvalidArgument));
  EXPECT_EQ(ReadWholeFile(InStore("mine/notes")), "precious");
}

TEST_F(StoreTest, ReplaceWithoutExchangeIsRefusedAndChangesNothing) {
  const TinySpec old_spec = DefaultTinySpec(1);
  ASSERT_OK(Save("step", old_spec));
  ObservedFileSystem no_exchange(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kExchange ? Status(Code::kUnsupported, "no exchange here") : Status();
  });
  EXPECT_THAT(WriteTinyCheckpoint(no_exchange, StorePath(), "step", DefaultTinySpec(2),
                                  {.if_exists = IfExists::kReplace}),
              HasCode(Code::kUnsupported));
  EXPECT_TRUE(HoldsWhole(InStore("step"), old_spec));
}

TEST_F(StoreTest, RenameThatSucceededDespiteAnErrorIsACommit) {
  // As NFS answers when the reply to a rename was lost and the request sent again.
  ObservedFileSystem nfs(fs(), [&](const FileEvent& e) {
    if (e.op != FileOp::kRename || !e.path2.ends_with("/step")) return Status();
    EXPECT_OK(fs().RenameNoReplace(e.path, e.path2));
    return Status::FromErrno(ENOENT, "rename", e.path);
  });
  const TinySpec spec = DefaultTinySpec();
  EXPECT_OK(WriteTinyCheckpoint(nfs, StorePath(), "step", spec));
  EXPECT_TRUE(HoldsWhole(InStore("step"), spec));
}

TEST_F(StoreTest, ErrorNamesTheMissingManifest) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging staging = Written(store, "step", spec);
  EXPECT_THAT(store.Publish(staging, TinyCoordinator(spec),
                            {.expected_manifests = {"rank-0.tmm", "rank-1.tmm", "rank-2.tmm"}}),
              HasMessage("manifest/rank-2.tmm: the manifest is missing"));
  EXPECT_THAT(NamesIn(StorePath()), testing::Not(testing::Contains("step")));
  // Without the expectation the hole itself is found.
  ASSERT_OK(fs().RemoveFile(JoinPath(staging.directory, "manifest/rank-1.tmm")));
  const auto hole = store.Publish(staging, TinyCoordinator(spec), {});
  EXPECT_THAT(hole, HasCode(Code::kDataLoss));
  EXPECT_THAT(hole, HasMessage("[4:8, 0:16]"));
}

TEST_F(StoreTest, PublishRefusesMissingOrShortDataFiles) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging staging = Written(store, "step", spec);
  const std::string file = JoinPath(staging.directory, "data/" + staging.ShortId() + "-t1.bin");
  const std::string bytes = ReadWholeFile(file);
  ASSERT_OK(fs().RemoveFile(file));
  const auto missing = store.Publish(staging, TinyCoordinator(spec), {});
  EXPECT_THAT(missing, HasCode(Code::kDataLoss));
  EXPECT_THAT(missing, HasMessage("-t1.bin"));
  WriteWholeFile(file, bytes + "x");
  EXPECT_THAT(store.Publish(staging, TinyCoordinator(spec), {}), HasCode(Code::kDataLoss));
  WriteWholeFile(file + ".hold", bytes);
  ASSERT_OK(fs().RemoveFile(file));
  ASSERT_EQ(symlink((file + ".hold").c_str(), file.c_str()), 0);
  EXPECT_THAT(store.Publish(staging, TinyCoordinator(spec), {}), HasCode(Code::kDataLoss));
}

TEST_F(StoreTest, FilesInNoManifestAreNotPublished) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging staging = Written(store, "step", spec);
  WriteWholeFile(JoinPath(staging.directory, "data/condemned.bin"), "half");
  WriteWholeFile(JoinPath(staging.directory, "manifest/rank-0.tmm.tmp"), "half");
  ASSERT_OK(store.Publish(staging, TinyCoordinator(spec), {}));
  EXPECT_TRUE(HoldsWhole(InStore("step"), spec));
  EXPECT_THAT(NamesIn(InStore("step/manifest")),
              ElementsAre("coordinator.tmm", "rank-0.tmm", "rank-1.tmm"));
}

TEST_F(StoreTest, DataFileOfAnEarlierCheckpointMayBeLinked) {
  TinySpec spec = DefaultTinySpec();
  const auto first = Save("step-1", spec);
  ASSERT_OK(first);
  const std::string old_file =
      InStore("step-1/data/" + first.value().info.uuid.Short() + "-t1.bin");
  const Store store = MakeStore();
  const Staging staging = Written(store, "step-2", spec);
  const std::string file = JoinPath(staging.directory, "data/" + staging.ShortId() + "-t1.bin");
  ASSERT_OK(fs().RemoveFile(file));
  ASSERT_OK(fs().Link(old_file, file));
  ASSERT_OK(store.Publish(staging, TinyCoordinator(spec), {}));
  EXPECT_TRUE(HoldsWhole(InStore("step-2"), spec));
  ASSERT_OK(store.Remove("step-1"));
  ASSERT_OK(store.Gc({.grace = std::chrono::seconds(0)}));
  EXPECT_TRUE(HoldsWhole(InStore("step-2"), spec));
}

TEST_F(StoreTest, ManifestsOfAnotherSaveAndNamesOutsideAreRefused) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging a = Written(store, "a", spec);
  const Staging b = Written(store, "b", spec);
  const std::string manifest = ReadWholeFile(JoinPath(a.directory, "manifest/rank-0.tmm"));
  WriteWholeFile(JoinPath(b.directory, "manifest/rank-0.tmm"), manifest);
  EXPECT_THAT(store.Publish(b, TinyCoordinator(spec), {}), HasMessage("belongs to checkpoint"));

  auto decoded = DecodeManifest(manifest, "m");
  ASSERT_OK(decoded);
  Inventory inventory = std::move(decoded.value().inventory);
  ASSERT_EQ(inventory.files[0].placement, Placement::kTensorFile);
  inventory.files[0].name = "data/../../../a";
  const auto encoded = EncodeManifest(inventory, decoded.value().leaves);
  if (encoded.ok()) {
    WriteWholeFile(JoinPath(a.directory, "manifest/rank-0.tmm"), encoded.value());
    EXPECT_THAT(store.Publish(a, TinyCoordinator(spec), {}), HasCode(Code::kDataLoss));
  }
}

TEST_F(StoreTest, StagingOfAnotherSaveIsNotPublished) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  Staging staging = Written(store, "a", spec);
  staging.uuid = Uuid::Random();
  EXPECT_THAT(store.Publish(staging, TinyCoordinator(spec), {}), HasCode(Code::kInvalidArgument));
}

}  // namespace
}  // namespace tensormount
