// SPDX-License-Identifier: Apache-2.0
#include "fs/metrics_text.h"

#include <limits>

#include <gtest/gtest.h>

namespace tensormount::fs {
namespace {

TEST(MetricsText, IsTheFormat) {
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

TEST(MetricsText, LabelsHoldAnything) {
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

TEST(MetricsText, Numbers) {
  EXPECT_EQ(MetricsText::Number(std::numeric_limits<double>::infinity()), "+Inf");
  EXPECT_EQ(MetricsText::Number(-std::numeric_limits<double>::infinity()), "-Inf");
  EXPECT_EQ(MetricsText::Number(std::numeric_limits<double>::quiet_NaN()), "NaN");
  EXPECT_EQ(MetricsText::Number(1.024e-06), "1.024e-06");
}

}  // namespace
}  // namespace tensormount::fs
