// SPDX-License-Identifier: Apache-2.0
#include "fs/metrics_text.h"

#include <chrono>
#include <limits>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fs/mount_stats.h"

namespace tensormount::fs {
namespace {

TEST(MetricsText, MatchesThePrometheusFormat) {
  MetricsText text;
  text.One("a_total", MetricsText::Type::kCounter, "What", std::uint64_t{18446744073709551615U});
  text.Family("b", MetricsText::Type::kGauge, "Which");
  text.Sample({{"x", "1"}, {"y", ""}}, -1);
  text.Sample({}, 0.5);
  EXPECT_EQ(std::move(text).Take(),
            "# HELP tensormount_a_total What\n# TYPE tensormount_a_total counter\n"
            "tensormount_a_total 18446744073709551615\n"
            "# HELP tensormount_b Which\n# TYPE tensormount_b gauge\n"
            "tensormount_b{x=\"1\",y=\"\"} -1\ntensormount_b 0.5\n");
}

TEST(MetricsText, LabelsAreEscaped) {
  const auto label = [](std::string_view value) {
    MetricsText text;
    text.Family("a", MetricsText::Type::kGauge, "What");
    text.Sample({{"x", value}}, 1);
    const std::string all = std::move(text).Take();
    const std::size_t begin = all.rfind("x=") + 3;
    return all.substr(begin, all.rfind('"') - begin);
  };
  EXPECT_EQ(label("a\\b\"c\nd"), "a\\\\b\\\"c\\nd");
  EXPECT_EQ(label("schl\xc3\xbcssel"), "schl\xc3\xbcssel");
  EXPECT_EQ(label("a\xff\xc3"), "a??");
  EXPECT_EQ(label("\x1b[31m\x7f"), "?[31m?");
  EXPECT_EQ(label(std::string_view("a\0b", 3)), "a?b");
}

TEST(MetricsText, NumbersArePrintedAsPrometheusExpects) {
  EXPECT_EQ(MetricsText::Number(std::numeric_limits<double>::infinity()), "+Inf");
  EXPECT_EQ(MetricsText::Number(-std::numeric_limits<double>::infinity()), "-Inf");
  EXPECT_EQ(MetricsText::Number(std::numeric_limits<double>::quiet_NaN()), "NaN");
  EXPECT_EQ(MetricsText::Number(1.024e-06), "1.024e-06");
}

TEST(MountStatsTest, BucketsAreCumulative) {
  MountStats stats;
  stats.Count(Op::kRead, std::chrono::nanoseconds(500), false);
  stats.Count(Op::kRead, std::chrono::microseconds(2), false);
  stats.Count(Op::kRead, std::chrono::minutes(3), true);
  MetricsText text;
  stats.AddMetrics(text);
  const std::string all = std::move(text).Take();
  const auto line = [](std::string_view suffix, std::string_view le, int count) {
    return testing::HasSubstr("tensormount_request_seconds_" + std::string(suffix) +
                              "{tier=\"daemon\",operation=\"read\"" + std::string(le) + "} " +
                              std::to_string(count) + "\n");
  };
  EXPECT_THAT(all, line("bucket", ",le=\"1.024e-06\"", 1));
  EXPECT_THAT(all, line("bucket", ",le=\"4.096e-06\"", 2));
  EXPECT_THAT(all, line("bucket", ",le=\"+Inf\"", 3));
  EXPECT_THAT(all, line("count", "", 3));
}

}  // namespace
}  // namespace tensormount::fs
