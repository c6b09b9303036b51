// Compares optimizers that libtorch does not have with PyTorch's classes in Python, whose results are in
// torch_reference.txt (torch_reference.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "contract/tensor_problem.hpp"

namespace zr::testing {
namespace {

const std::string kPlugins = ZR_BUILD_DIR "/plugins";

struct TorchCase {
  std::string plugin, text;
  double lr = 0;
  std::vector<int64_t> shape;
  Values values;
  std::map<std::string, std::string> texts;
  std::vector<std::vector<float>> weights;  // after each step
};

std::vector<int64_t> shape_of(std::string text) {
  std::replace(text.begin(), text.end(), 'x', ' ');
  std::istringstream words(text);
  return {std::istream_iterator<int64_t>(words), {}};
}

std::vector<TorchCase> cases_of(const std::string& plugin) {
  std::vector<TorchCase> all;
  std::ifstream in(ZR_SOURCE_DIR "/tests/contract/torch_reference.txt");
  bool starts = true;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') {
      starts = true;
      continue;
    }
    std::istringstream words(line);
    if (!starts) {
      all.back().weights.emplace_back(std::istream_iterator<float>(words), std::istream_iterator<float>());
      continue;
    }
    starts = false;
    TorchCase& one = all.emplace_back();
    one.text = line;
    std::string shape, key;
    words >> one.plugin >> one.lr >> shape;
    one.shape = shape_of(shape);
    while (words >> key) {
      const auto equals = key.find('=');
      const std::string name = key.substr(0, equals), value = key.substr(equals + 1);
      if (std::isalpha(static_cast<unsigned char>(value[0])))
        one.texts[name] = value;
      else
        one.values[name] = std::stod(value);
    }
  }
  std::erase_if(all, [&](const TorchCase& one) { return one.plugin != plugin; });
  return all;
}

double norm_of_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(static_cast<double>(a[i]) - b[i], 2);
  return std::sqrt(sum);
}

// Steps the plug-in as the file says; every update may differ by `tolerance` of its own norm, and errors add up.
void expect_updates_of_torch(TorchCase one, double tolerance) {
  SCOPED_TRACE(one.text);
  const OptimizerUnderTest optimizer(kPlugins, one.plugin, one.values, one.texts);
  Tensor t(optimizer, one.shape);
  t.lr = one.lr;
  t.mul = 1;
  ASSERT_EQ(one.weights.size(), 3u);
  std::vector<float> before = t.weight;
  double allowed = 0;
  for (const std::vector<float>& after : one.weights) {
    t.run(optimizer);
    ASSERT_EQ(after.size(), t.weight.size());
    const double update = norm_of_difference(after, before);
    ASSERT_GT(update, 0);
    allowed += tolerance * update;
    EXPECT_LT(norm_of_difference(t.weight, after), allowed) << "step " << t.step - 1;
    before = after;
    t.new_gradient();
  }
}

}  // namespace

TEST(TorchReferenceTest, AdafactorUpdatesAsTorchDoes) {
  const std::vector<TorchCase> cases = cases_of("adafactor");
  ASSERT_EQ(cases.size(), 4u);
  for (const TorchCase& one : cases) expect_updates_of_torch(one, 1e-5);
}

// torch multiplies in bf16.
TEST(TorchReferenceTest, MuonInFp32UpdatesAsTorchDoesInBf16) {
  const std::vector<TorchCase> cases = cases_of("muon");
  ASSERT_EQ(cases.size(), 4u);
  for (const TorchCase& one : cases) expect_updates_of_torch(one, 2e-2);
}

// Equal but for the order of sums.
TEST(TorchReferenceTest, MuonInBf16UpdatesAsTorchDoes) {
  std::vector<TorchCase> cases = cases_of("muon");
  ASSERT_EQ(cases.size(), 4u);
  for (TorchCase& one : cases) {
    one.texts["precision"] = "bf16";
    expect_updates_of_torch(one, 8e-3);
  }
}

}  // namespace zr::testing
