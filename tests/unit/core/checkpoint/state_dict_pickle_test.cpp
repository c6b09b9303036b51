// The list of tensors in a file of torch.save(). state_dict.pkl is the data.pkl of
// tests/multirank/engine/state_dicts/state_dict.pt.
#include "checkpoint/state_dict_pickle.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "support/said_by.hpp"

namespace zr::host {
namespace {

using namespace std::string_literals;
using test::said_by;

std::string file() {
  std::ifstream in(ZR_SOURCE_DIR "/tests/unit/core/checkpoint/state_dict.pkl", std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string error_of(const std::string& pickle) {
  return said_by([&] { checkpoint::tensors_of_pickle("a.pt", pickle); });
}

const std::string kRemedy =
    "; save it with torch.save(model.state_dict(), file) in Python, or torch::pickle_save() of a "
    "c10::Dict<std::string, torch::Tensor> in C++";

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

// A pickle of {"w": tensor} with this offset, shape and stride in a storage of 12 fp32 elements.
// `metadata`: the 7th argument of _rebuild_tensor_v2, if any.
std::string one_tensor(const std::string& offset, const std::string& shape, const std::string& strides,
                       const std::string& metadata = "") {
  return joined({"\x80\x02}X\x01\0\0\0w"s, "ctorch._utils\n_rebuild_tensor_v2\n((",
                 "X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"s, "0", "X\x03\0\0\0cpuK\x0ctQ"s, offset, shape,
                 strides, "\x89}", metadata, "tRs."});
}

TEST(StateDictPickleTest, ListsTheTensorsOfAFileOfPyTorch) {
  const std::vector<checkpoint::PickledTensor> tensors = checkpoint::tensors_of_pickle("a.pt", file());
  ASSERT_EQ(tensors.size(), 7u);
  EXPECT_EQ(tensors[0].name, "0.weight");
  EXPECT_EQ(tensors[0].dtype, "F32");
  EXPECT_EQ(tensors[0].storage, "0");
  EXPECT_EQ(tensors[0].storage_count, 12);
  EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(tensors[0].strides, (std::vector<int64_t>{4, 1}));
  EXPECT_EQ(tensors[4].name, "1.running_mean");
  EXPECT_EQ(tensors[6].name, "1.num_batches_tracked");
  EXPECT_EQ(tensors[6].dtype, "I64");
  EXPECT_TRUE(tensors[6].shape.empty());
}

TEST(StateDictPickleTest, AcceptsViewsInsideTheirStorage) {
  const std::vector<checkpoint::PickledTensor> tensors =
      checkpoint::tensors_of_pickle("a.pt", one_tensor("K\x03", "K\x03K\x02\x86", "K\x01K\x04\x86"));
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors[0].offset, 3);
  EXPECT_EQ(tensors[0].strides, (std::vector<int64_t>{1, 4}));
}

std::string tensor_with_metadata(const std::string& metadata) {
  return one_tensor("K\0"s, "K\x03\x85", "K\x01\x85", metadata);
}

TEST(StateDictPickleTest, ReadsTheNegativeBit) {
  const auto negative = [](const std::string& metadata) {
    return checkpoint::tensors_of_pickle("a.pt", tensor_with_metadata(metadata)).at(0).negative;
  };
  EXPECT_FALSE(negative(""));
  EXPECT_FALSE(negative("N"));
  EXPECT_FALSE(negative("}"));
  EXPECT_TRUE(negative("}X\x03\0\0\0neg\x88s"s));
  EXPECT_FALSE(negative("}X\x03\0\0\0neg\x89s"s));
  EXPECT_TRUE(negative("}X\x04\0\0\0conj\x89sX\x03\0\0\0neg\x88s"s));
}

TEST(StateDictPickleTest, RejectsMetadataThatItCannotApply) {
  const auto error = [](const std::string& name) {
    return "a.pt: the tensor 'w' has the metadata '" + name +
           "', which Zeroth cannot apply; save a tensor without it, for example tensor.resolve_conj().clone()";
  };
  EXPECT_EQ(error_of(tensor_with_metadata("}X\x04\0\0\0conj\x88s"s)), error("conj"));
  EXPECT_EQ(error_of(tensor_with_metadata("}X\x05\0\0\0other\x89s"s)), error("other"));
  EXPECT_EQ(error_of(tensor_with_metadata("}X\x03\0\0\0negK\x01s"s)), error("neg"));
  EXPECT_EQ(error_of(tensor_with_metadata("K\x01")), "a.pt: is damaged: a tensor has an invalid description" + kRemedy);
  EXPECT_EQ(error_of(tensor_with_metadata("NN")), "a.pt: is damaged: a tensor has an invalid description" + kRemedy);
}

TEST(StateDictPickleTest, RejectsRepeatedNames) {
  const std::string tensor = one_tensor("K\0"s, "K\x03\x85", "K\x01\x85");
  const std::string entry = tensor.substr(3, tensor.size() - 4);  // without protocol, dictionary and end
  EXPECT_EQ(error_of("\x80\x02}"s + entry + entry + "."), "a.pt: its dictionary has the name 'w' twice" + kRemedy);
}

// The same in protocol 4: frames, short texts, names from the stack, and an implicit memo.
TEST(StateDictPickleTest, AcceptsNewerProtocols) {
  const std::string pickle = joined({"\x80\x04\x95\x80\0\0\0\0\0\0\0}\x94\x8c\x01w\x94"s,
                                     "\x8c\x0ctorch._utils\x94\x8c\x12_rebuild_tensor_v2\x94\x93\x94((",
                                     "\x8c\x07storage\x94\x8c\x05torch\x94\x8c\x0c"
                                     "FloatStorage\x94\x93\x94\x8c\x01"
                                     "0\x94\x8c\x03"
                                     "cpu\x94K\x0ct\x94Q",
                                     "K\x03K\x02\x85\x94K\x04\x85\x94\x89}\x94h\x01\x8c\x01u\x94st\x94R\x94s."s});
  const std::vector<checkpoint::PickledTensor> tensors = checkpoint::tensors_of_pickle("a.pt", pickle);
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors[0].name, "w");
  EXPECT_EQ(tensors[0].dtype, "F32");
  EXPECT_EQ(tensors[0].offset, 3);
  EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{2}));
  EXPECT_EQ(tensors[0].strides, (std::vector<int64_t>{4}));
}

// torch::pickle_save() of a c10::Dict.
TEST(StateDictPickleTest, AcceptsDictionariesWithATypeTag) {
  EXPECT_TRUE(
      checkpoint::tensors_of_pickle("a.pt",
                                    "\x80\x02"
                                    "ctorch.jit._pickle\nrestore_type_tag\n}X\x11\0\0\0Dict[str, Tensor]\x86R."s)
          .empty());
}

TEST(StateDictPickleTest, RejectsViewsThatExceedTheirStorage) {
  const std::string outside = "a.pt: is damaged: a tensor exceeds its storage" + kRemedy;
  EXPECT_EQ(error_of(one_tensor("K\0"s, "K\x0d\x85", "K\x01\x85")), outside);
  EXPECT_EQ(error_of(one_tensor("K\x01", "K\x03K\x04\x86", "K\x04K\x01\x86")), outside);
  EXPECT_EQ(error_of(one_tensor("K\0"s, "K\x02\x85", "\x8a\x06\0\0\0\0\0\x01\x85"s)), outside);
  EXPECT_EQ(error_of(one_tensor("J\xff\xff\xff\xff", "K\x01\x85", "K\x01\x85")),
            "a.pt: is damaged: a tensor has an invalid shape" + kRemedy);
  EXPECT_EQ(error_of(one_tensor("K\0"s, "J\xff\xff\xff\xff\x85", "K\x01\x85")),
            "a.pt: is damaged: a tensor has an invalid shape" + kRemedy);
}

// 2^62 + 12 elements of 4 bytes are 2^64 + 48 bytes, which 64 bits cannot tell from the 48 bytes of 12 elements.
TEST(StateDictPickleTest, RejectsStoragesWhoseSizeOverflows) {
  std::string pickle = one_tensor("K\0"s, "K\x0c\x85", "K\x01\x85");
  const std::string count = "K\x0ctQ";
  const auto at = pickle.find(count);
  ASSERT_NE(at, pickle.npos);
  EXPECT_EQ(error_of(pickle), "nothing");
  pickle.replace(at, count.size(), "\x8a\x08\x0c\0\0\0\0\0\0\x40tQ"s);
  EXPECT_EQ(error_of(pickle), "a.pt: is damaged: a storage has an invalid description" + kRemedy);
}

TEST(StateDictPickleTest, RejectsObjectsThatAreNotTensors) {
  EXPECT_EQ(error_of("\x80\x02"
                     "cos\nsystem\nX\x02" +
                     "\0\0\0ls\x85R."s),
            "a.pt: contains an object of os system, not only tensors" + kRemedy);
  EXPECT_EQ(error_of("}X\x05\0\0\0epochK\x03s."s),
            "a.pt: the entry 'epoch' of its dictionary is not a tensor" + kRemedy);
  EXPECT_EQ(error_of("]."), "a.pt: contains no dictionary of tensors" + kRemedy);
  EXPECT_EQ(error_of("}K\x01K\x02s."), "a.pt: the keys of its dictionary are not names" + kRemedy);
  EXPECT_EQ(error_of("c__torch__\nModule\n)\x81}b."),
            "a.pt: contains an object of __torch__ Module, not only tensors" + kRemedy);
  EXPECT_EQ(error_of("\x80\x02i"), "a.pt: contains an object that is not a tensor, a number or a text" + kRemedy);
}

// torch.save(..., pickle_protocol=0) and 1 use text operations: 'I' is an integer, 'U' a short text.
TEST(StateDictPickleTest, RejectsOldProtocols) {
  const std::string old = "a.pt: is pickled with protocol 0 or 1, and Zeroth reads protocols 2 to 5" + kRemedy;
  EXPECT_EQ(error_of("(dp0\nVw\np1\n"), old);
  EXPECT_EQ(error_of("}U\x01wK\x01s."), old);
}

TEST(StateDictPickleTest, RejectsDamagedPickles) {
  EXPECT_EQ(error_of(""), "a.pt: is damaged: its list of tensors ends too early" + kRemedy);
  EXPECT_EQ(error_of("R"), "a.pt: is damaged: an operation of its list of tensors has no operand" + kRemedy);
  EXPECT_EQ(error_of("h\x05"), "a.pt: is damaged: its list of tensors refers to a value that does not exist" + kRemedy);
  EXPECT_EQ(error_of("K\x01K\x02\x93."), "a.pt: is damaged: a name of an object is not a text" + kRemedy);
  EXPECT_EQ(error_of("}(K\x01u."), "a.pt: is damaged: a key of its dictionary has no value" + kRemedy);
  EXPECT_EQ(error_of("X\xff\xff\xff\xff"s), "a.pt: is damaged: its list of tensors ends too early" + kRemedy);
}

// A dictionary that contains itself, and tuples nested 65,536 deep.
TEST(StateDictPickleTest, SurvivesCyclesAndDeepNesting) {
  EXPECT_EQ(error_of("}q\0X\x05\0\0\0modelh\0s."s).substr(0, 5), "a.pt:");
  EXPECT_EQ(error_of(joined({"N", std::string(1 << 16, '\x85'), "."})),
            "a.pt: contains no dictionary of tensors" + kRemedy);
}

// Whatever one byte or the end of the file is changed to, the result is an error or a list of valid tensors.
TEST(StateDictPickleTest, EveryChangedByteIsAnErrorOrAValidList) {
  const std::string intact = file();
  const auto check = [](const std::string& pickle) {
    try {
      for (const checkpoint::PickledTensor& one : checkpoint::tensors_of_pickle("a.pt", pickle)) {
        EXPECT_EQ(one.shape.size(), one.strides.size());
        EXPECT_LE(one.offset, one.storage_count);
      }
    } catch (const UserError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("a.pt: ", 0), 0u);
    }
  };
  for (std::size_t i = 0; i < intact.size(); ++i) {
    check(intact.substr(0, i));
    for (const int value : std::vector<int>{0, 0xff, '.', '(', 'R', intact[i] ^ 1, intact[i] ^ 0x80, intact[i] + 1}) {
      std::string changed = intact;
      changed[i] = static_cast<char>(value);
      check(changed);
    }
  }
}

}  // namespace
}  // namespace zr::host
