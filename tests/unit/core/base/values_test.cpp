// Rounding, hexadecimal text, names of operations.
#include <gtest/gtest.h>

#include "base/hex.hpp"
#include "base/operation.hpp"
#include "base/round_up.hpp"

namespace zr::host {
namespace {

TEST(RoundUpTest, GivesTheNextMultiple) {
  EXPECT_EQ(round_up(0, 64), 0);
  EXPECT_EQ(round_up(1, 64), 64);
  EXPECT_EQ(round_up(64, 64), 64);
  EXPECT_EQ(round_up(65, 64), 128);
  EXPECT_EQ(round_up(7, 3), 9);
}

TEST(HexTest, WritesTheMostSignificantDigitFirst) {
  EXPECT_EQ(hex(0), "0000000000000000");
  EXPECT_EQ(hex(0x0123456789abcdef), "0123456789abcdef");
  EXPECT_EQ(hex(~uint64_t{0}), "ffffffffffffffff");
}

TEST(HexTest, WritesTwoDigitsPerByte) {
  EXPECT_EQ(hex_of_bytes(""), "");
  EXPECT_EQ(hex_of_bytes(std::string_view("\0\x7f\xff", 3)), "007fff");
}

TEST(HexTest, ReadsWhatItWrites) {
  for (const uint64_t value : {uint64_t{0}, uint64_t{0x0123456789abcdef}, ~uint64_t{0}})
    EXPECT_EQ(value_from_hex(hex(value)), value);
  EXPECT_EQ(bytes_from_hex(""), "");
  EXPECT_EQ(bytes_from_hex("007fff"), std::string("\0\x7f\xff", 3));
}

TEST(HexTest, RejectsOtherText) {
  for (const char* text : {"0", "0g", "0G", "AB", "0x", " 0", "-1"}) EXPECT_EQ(bytes_from_hex(text), std::nullopt);
  for (const char* text : {"", "00", "0123456789abcde", "0123456789abcdef0", "0123456789abcdef00", "0123456789ABCDEF"})
    EXPECT_EQ(value_from_hex(text), std::nullopt);
}

TEST(OperationTest, HasTheNameOfEveryOperation) {
  EXPECT_EQ(name_of_op(0), "nothing");
  EXPECT_EQ(name_of_op(ZR_ALL_REDUCE), "all_reduce");
  EXPECT_EQ(name_of_op(ZR_REDUCE_SCATTER), "reduce_scatter");
  EXPECT_EQ(name_of_op(ZR_ALL_GATHER), "all_gather");
  EXPECT_EQ(name_of_op(ZR_BROADCAST), "broadcast");
  EXPECT_EQ(name_of_op(ZR_REDUCE), "reduce");
  EXPECT_EQ(name_of_op(ZR_GATHER), "gather");
  EXPECT_EQ(name_of_op(ZR_SCATTER), "scatter");
  EXPECT_EQ(name_of_op(ZR_ALL_TO_ALL), "all_to_all");
  EXPECT_EQ(name_of_op(ZR_SEND), "send");
  EXPECT_EQ(name_of_op(ZR_RECV), "recv");
  EXPECT_EQ(name_of_op(ZR_BARRIER), "barrier");
  EXPECT_EQ(name_of_op(99), "unknown operation");
}

}  // namespace
}  // namespace zr::host
