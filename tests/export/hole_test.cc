// SPDX-License-Identifier: Apache-2.0
// Export of a source that lacks cells.
#include "tensormount/communicator.h"

#include "fs/export/export.h"
#include "tests/adopt/foreign_support.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

// 400 x 300, of which [100:400, 200:250] is stored by nobody; the file beside it is whole.
TEST(ExportOfAHole, HoleErrorNamesTheBoxAndLeavesNothing) {
  TempDir dir;
  Random random(TestSeed());
  HandMade made(dir.Join("source"), random, {1u << 20});
  const auto box = [](const Dims& begin, const Dims& extent) {
    return Region(Box::Make(begin, extent).value());
  };
  made.Add("a.whole", DType::kF32, {5, 7}, {{box({0, 0}, {5, 7}), 0, 3, {}}});
  made.Add("hole", DType::kF32, {400, 300},
           {{box({0, 0}, {100, 300}), 0, 0, {}},
            {box({100, 0}, {300, 200}), 0, 120'000, {4, 1200}},
            {box({100, 250}, {300, 50}), 0, 400'000, {}}});
  made.Add("z.whole", DType::kU8, {3}, {{box({0}, {3}), 0, 9, {}}});
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<OpenedCheckpoint> source, made.Open(HostFileSystem()));
  const std::string out = dir.Join("out");
  ASSERT_OK(HostFileSystem().CreateDirectory(out));
  for (const ExportFormat format :
       {ExportFormat::kSafetensors, ExportFormat::kHf, ExportFormat::kNpy, ExportFormat::kZarr,
        ExportFormat::kDcp, ExportFormat::kTorch}) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(std::string(ExportFormatName(format)) + std::to_string(ranks));
      ExportOptions options;
      options.format = format;
      const Status status = RunOnThreads(ranks, [&](Communicator& comm) {
        const Status mine =
            Export(HostFileSystem(), {}, source, out + "/x", comm, options).status();
        EXPECT_THAT(mine, HasCode(Code::kDataLoss));
        EXPECT_THAT(mine.message(),
                    testing::HasSubstr("tensor hole [100:400, 200:250] is stored in no chunk"));
        return mine;
      });
      EXPECT_THAT(status, HasCode(Code::kDataLoss));
      ASSERT_OK_AND_ASSIGN(const auto left, HostFileSystem().List(out));
      EXPECT_THAT(left, testing::IsEmpty());
    }
  }
}

}  // namespace
}  // namespace tensormount::fs
