// The service "zr.host.store/1" as plug-ins see it, in a job of one rank.
#include "control/job_services.hpp"

#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"
#include "zr/abi/host.h"

namespace {

using namespace zr::host;

struct JobServicesTest : ::testing::Test {
  Ledger ledger;
  ThreadPool pool{1};
  plugin::PluginHost host{ledger, pool};
  std::shared_ptr<control::Control> control = control::Control::join(std::chrono::seconds(1));
  control::JobServices services{host, *control, ""};
  const zr_store_service* store =
      static_cast<const zr_store_service*>(host.abi()->service(host.abi(), "zr.host.store/1"));
  CallError error;

  zr_code put(const std::string& key, const std::string& value) {
    return store->put(host.abi(), key.c_str(), value.data(), value.size(), &error);
  }
  zr_code get(const std::string& key, std::string& value) {
    uint64_t bytes = value.size();
    const zr_code code = store->get(host.abi(), key.c_str(), 0, value.data(), &bytes, &error);
    if (code == ZR_OK) value.resize(bytes);
    return code;
  }
};

TEST_F(JobServicesTest, StoresTheLongestKeyAndValue) {
  const std::string key(4096, 'k'), value(1 << 20, 'v');
  std::string read((1 << 20) + 1, '\0');
  ASSERT_EQ(put(key, value), ZR_OK) << error.msg;
  ASSERT_EQ(get(key, read), ZR_OK) << error.msg;
  EXPECT_EQ(read, value);
}

TEST_F(JobServicesTest, RejectsLongerKeysAndValuesAsInvalid) {
  const std::string key(4097, 'k'), start(60, 'k'), value((1 << 20) + 1, 'v');
  EXPECT_EQ(put("big", value), ZR_INVALID);
  EXPECT_STREQ(error.msg,
               "the job's store accepts values of at most 1048576 bytes (1 MiB), but the value of 'big' has 1048577");
  EXPECT_EQ(put(std::string(100, 'k'), value), ZR_INVALID);
  EXPECT_EQ(error.msg, "the job's store accepts values of at most 1048576 bytes (1 MiB), but the value of '" + start +
                           "...' has 1048577");
  const std::string long_key = "the job's store accepts keys of at most 4096 bytes, but '" + start + "...' has 4097";
  EXPECT_EQ(put(key, "x"), ZR_INVALID);
  EXPECT_EQ(error.msg, long_key);
  error = CallError();
  std::string read(10, '\0');
  EXPECT_EQ(get(key, read), ZR_INVALID);
  EXPECT_EQ(error.msg, long_key);
}

TEST_F(JobServicesTest, ReportsAKeyThatNoRankHasPut) {
  std::string read(10, '\0');
  EXPECT_EQ(get("missing", read), ZR_COMM);
  EXPECT_STREQ(error.msg, "no rank has put 'missing' into the job's store within 0.0s");
}

}  // namespace
