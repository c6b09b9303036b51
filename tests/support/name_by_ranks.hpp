// Names the parameters of INSTANTIATE_TEST_SUITE_P that are numbers of ranks: On4; with the ranks of each host, On211.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zr::test {

struct NameByRanks {
  std::string operator()(const ::testing::TestParamInfo<int>& info) const { return "On" + std::to_string(info.param); }
  std::string operator()(const ::testing::TestParamInfo<std::vector<int>>& info) const {
    std::string name = "On";
    for (const int ranks : info.param) name += std::to_string(ranks);
    return name;
  }
};

}  // namespace zr::test
