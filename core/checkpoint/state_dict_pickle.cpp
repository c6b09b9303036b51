#include "checkpoint/state_dict_pickle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host::checkpoint {

namespace {

enum class Kind { none, boolean, integer, number, text, sequence, dictionary, global, storage, tensor, mark };

// A value on the stack of the pickle machine. Nodes belong to the machine, so that cycles and deep nesting are
// harmless.
struct Node {
  Kind kind = Kind::none;
  int64_t integer = 0;                           // boolean, integer
  std::string text;                              // text, global: "torch FloatStorage"
  std::vector<Node*> items;                      // sequence
  std::vector<std::pair<Node*, Node*>> entries;  // dictionary
  PickledTensor tensor;                          // storage and tensor
  std::string metadata;                          // tensor: metadata that changes the values and cannot be applied
};

const std::map<std::string, std::string>& storage_dtypes() {
  static const auto* dtypes = new std::map<std::string, std::string>{
      {"torch FloatStorage", "F32"},     {"torch DoubleStorage", "F64"}, {"torch HalfStorage", "F16"},
      {"torch BFloat16Storage", "BF16"}, {"torch LongStorage", "I64"},   {"torch IntStorage", "I32"},
      {"torch ShortStorage", "I16"},     {"torch CharStorage", "I8"},    {"torch ByteStorage", "U8"},
      {"torch BoolStorage", "BOOL"}};
  return *dtypes;  // never destroyed
}

constexpr int64_t kMaxElements = int64_t{1} << 62;  // of a dimension; products and sums are checked one by one
constexpr int64_t kMaxStorage = int64_t{1} << 48;   // elements; their number of bytes does not overflow

class Machine {
 public:
  Machine(const std::string& file, std::string_view pickle)
      : file_(file), old_protocol_(!pickle.starts_with('\x80')), rest_(pickle) {}

  Node* run() {
    for (;;) {
      const auto op = static_cast<unsigned char>(bytes(1)[0]);
      if (op == '.') return pop();
      step(op);
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    fail_user(
        fmt::format("{}: {}; save it with torch.save(model.state_dict(), file) in Python, or torch::pickle_save() "
                    "of a c10::Dict<std::string, torch::Tensor> in C++",
                    file_, what));
  }

  std::string_view bytes(uint64_t count) {
    if (count > rest_.size()) fail("is damaged: its list of tensors ends too early");
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);  // pickles are little-endian
    return value;
  }
  std::string line() {
    const auto end = rest_.find('\n');
    if (end == rest_.npos) fail("is damaged: its list of tensors ends too early");
    const std::string text(bytes(end));
    bytes(1);
    return text;
  }

  Node* make(Kind kind) {
    nodes_.emplace_back();
    nodes_.back().kind = kind;
    return &nodes_.back();
  }
  Node* pop() {
    if (stack_.empty()) fail("is damaged: an operation of its list of tensors has no operand");
    Node* top = stack_.back();
    stack_.pop_back();
    return top;
  }
  Node* top(Kind kind, const char* what) {
    if (stack_.empty() || stack_.back()->kind != kind) fail(std::string("contains ") + what);
    return stack_.back();
  }
  std::vector<Node*> pop_to_mark() {
    std::vector<Node*> items;
    for (Node* node = pop(); node->kind != Kind::mark; node = pop()) items.push_back(node);
    return {items.rbegin(), items.rend()};
  }
  void push_sequence(std::vector<Node*> items) {
    Node* node = make(Kind::sequence);
    node->items = std::move(items);
    stack_.push_back(node);
  }
  void push_integer(int64_t value) {
    Node* node = make(Kind::integer);
    node->integer = value;
    stack_.push_back(node);
  }
  void push_boolean(bool value) {
    Node* node = make(Kind::boolean);
    node->integer = value;
    stack_.push_back(node);
  }
  void push_text(uint64_t size) {
    const std::string_view text = bytes(size);
    Node* node = make(Kind::text);
    node->text = text;
    stack_.push_back(node);
  }
  void push_tuple(std::size_t count) {
    std::vector<Node*> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    push_sequence(std::move(items));
  }
  void remember(uint64_t index) {
    if (stack_.empty()) fail("is damaged: an operation of its list of tensors has no operand");
    memo_[index] = stack_.back();
  }
  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail("is damaged: its list of tensors refers to a value that does not exist");
    stack_.push_back(found->second);
  }
  void set_items(const std::vector<Node*>& items) {
    Node* dictionary = top(Kind::dictionary, "an object that is not a dictionary");
    if (items.size() % 2) fail("is damaged: a key of its dictionary has no value");
    for (std::size_t i = 0; i < items.size(); i += 2) dictionary->entries.emplace_back(items[i], items[i + 1]);
  }
  void append_items(const std::vector<Node*>& items) {
    Node* list = top(Kind::sequence, "an object that is not a list");
    list->items.insert(list->items.end(), items.begin(), items.end());
  }

  // ("storage", type, key, location, number of elements) -> a storage.
  void persistent() {
    Node* id = pop();
    Node* node = make(Kind::storage);
    const auto& items = id->items;
    const bool valid = id->kind == Kind::sequence && items.size() == 5 && items[1]->kind == Kind::global &&
                       items[2]->kind == Kind::text && items[4]->kind == Kind::integer && items[4]->integer >= 0 &&
                       items[4]->integer <= kMaxStorage;
    if (!valid) fail("is damaged: a storage has an invalid description");
    const auto dtype = storage_dtypes().find(items[1]->text);
    if (dtype == storage_dtypes().end()) fail("contains a storage of the type " + printable(items[1]->text));
    node->tensor.dtype = dtype->second;
    node->tensor.storage = items[2]->text;
    node->tensor.storage_count = items[4]->integer;
    if (node->tensor.storage_count < 0 || node->tensor.storage_count > kMaxElements)
      fail(fmt::format("is damaged: a storage has {} elements", node->tensor.storage_count));
    stack_.push_back(node);
  }

  std::vector<int64_t> integers_of(const Node* node) const {
    std::vector<int64_t> values;
    if (node->kind != Kind::sequence) fail("is damaged: a tensor has an invalid shape");
    for (const Node* item : node->items) {
      if (item->kind != Kind::integer || item->integer < 0 || item->integer > kMaxElements)
        fail("is damaged: a tensor has an invalid shape");
      values.push_back(item->integer);
    }
    return values;
  }

  // The 7th argument of _rebuild_tensor_v2: flags that are applied to the values, {"neg": True}.
  void set_metadata(Node* tensor, const Node* metadata) {
    if (metadata->kind == Kind::none) return;
    if (metadata->kind != Kind::dictionary) fail("is damaged: a tensor has an invalid description");
    for (const auto& [key, value] : metadata->entries) {
      if (key->kind != Kind::text) fail("is damaged: a tensor has an invalid description");
      const bool flag = (key->text == "neg" || key->text == "conj") && value->kind == Kind::boolean;
      if (flag && key->text == "neg")
        tensor->tensor.negative = value->integer != 0;
      else if (!flag || value->integer != 0)
        tensor->metadata = key->text;
    }
  }

  // _rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks, metadata) -> a tensor.
  Node* tensor_of(const std::vector<Node*>& arguments) {
    if (arguments.size() < 4 || arguments.size() > 7 || arguments[0]->kind != Kind::storage ||
        arguments[1]->kind != Kind::integer)
      fail("is damaged: a tensor has an invalid description");
    Node* node = make(Kind::tensor);
    PickledTensor& tensor = node->tensor = arguments[0]->tensor;
    tensor.offset = arguments[1]->integer;
    tensor.shape = integers_of(arguments[2]);
    tensor.strides = integers_of(arguments[3]);
    if (tensor.shape.size() != tensor.strides.size() || tensor.offset < 0 || tensor.offset > tensor.storage_count)
      fail("is damaged: a tensor has an invalid shape");
    int64_t last = tensor.offset, count = 1;
    bool inside = true;
    for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
      int64_t reach = 0;
      inside = inside && !__builtin_mul_overflow(count, tensor.shape[d], &count);
      if (tensor.shape[d] > 0)
        inside = inside && !__builtin_mul_overflow(tensor.shape[d] - 1, tensor.strides[d], &reach) &&
                 !__builtin_add_overflow(last, reach, &last);
    }
    if (!inside || (count > 0 && last >= tensor.storage_count)) fail("is damaged: a tensor exceeds its storage");
    if (arguments.size() == 7) set_metadata(node, arguments[6]);
    return node;
  }

  [[noreturn]] void fail_object(const Node* callable) const {
    const std::string name = callable->kind == Kind::global ? callable->text : "an object that is called";
    fail(fmt::format("contains an object of {}, not only tensors", printable(name)));
  }

  void reduce() {
    Node* arguments = pop();
    const Node* callable = pop();
    const std::string name = callable->kind == Kind::global ? callable->text : "";
    if (arguments->kind != Kind::sequence) fail("is damaged: a call has no arguments");
    if (name == "collections OrderedDict" && arguments->items.empty())
      stack_.push_back(make(Kind::dictionary));
    else if (name == "torch._utils _rebuild_tensor_v2")
      stack_.push_back(tensor_of(arguments->items));
    else if ((name == "torch._utils _rebuild_parameter" || name == "torch.jit._pickle restore_type_tag") &&
             !arguments->items.empty())
      stack_.push_back(arguments->items[0]);
    else
      fail_object(callable);
  }

  void push_global(const std::string& module, const std::string& name) {
    Node* node = make(Kind::global);
    node->text = fmt::format("{} {}", module, name);
    stack_.push_back(node);
  }
  void push_global_of_lines() {
    const std::string module = line();
    push_global(module, line());
  }
  void push_global_of_stack() {
    const Node* name = pop();
    const Node* module = pop();
    if (name->kind != Kind::text || module->kind != Kind::text) fail("is damaged: a name of an object is not a text");
    push_global(module->text, name->text);
  }

  void step(unsigned char op) {
    switch (op) {
      case 0x80: bytes(1); break;  // the version of the protocol
      case 0x95: bytes(8); break;  // the size of a frame
      case 'c': push_global_of_lines(); break;
      case 0x93: push_global_of_stack(); break;
      case 'q': remember(number<uint8_t>()); break;
      case 'r': remember(number<uint32_t>()); break;
      case 0x94: remember(memo_.size()); break;
      case 'h': recall(number<uint8_t>()); break;
      case 'j': recall(number<uint32_t>()); break;
      case '(': stack_.push_back(make(Kind::mark)); break;
      case ')':
      case ']': push_sequence({}); break;
      case '}': stack_.push_back(make(Kind::dictionary)); break;
      case 't': push_sequence(pop_to_mark()); break;
      case 0x85: push_tuple(1); break;
      case 0x86: push_tuple(2); break;
      case 0x87: push_tuple(3); break;
      case 'X': push_text(number<uint32_t>()); break;
      case 0x8c: push_text(number<uint8_t>()); break;
      case 'K': push_integer(number<uint8_t>()); break;
      case 'M': push_integer(number<uint16_t>()); break;
      case 'J': push_integer(number<int32_t>()); break;
      case 0x8a: push_long(); break;
      case 'G': bytes(8), stack_.push_back(make(Kind::number)); break;
      case 'N': stack_.push_back(make(Kind::none)); break;
      case 0x88:
      case 0x89: push_boolean(op == 0x88); break;
      case 'Q': persistent(); break;
      case 'R': reduce(); break;
      case 0x81:  // a class and the arguments of its __new__()
        pop();
        fail_object(pop());
      case 'u': set_items(pop_to_mark()); break;
      case 's': {
        Node* value = pop();
        set_items({pop(), value});
        break;
      }
      case 'e': append_items(pop_to_mark()); break;
      case 'a': append_items({pop()}); break;
      case 'b':  // attributes of an object; a dictionary's are the versions of the modules
        pop();
        top(Kind::dictionary, "an object with attributes, not only tensors");
        break;
      default:
        if (old_protocol_) fail("is pickled with protocol 0 or 1, and Zeroth reads protocols 2 to 5");
        fail("contains an object that is not a tensor, a number or a text");
    }
  }

  void push_long() {
    const std::string_view digits = bytes(number<uint8_t>());
    if (digits.size() > 8) fail("contains an integer of more than 64 bits");
    uint64_t value = digits.empty() || !(digits.back() & 0x80) ? 0 : ~uint64_t{0};
    for (std::size_t i = digits.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(digits[i]);
    push_integer(static_cast<int64_t>(value));
  }

  const std::string file_;
  const bool old_protocol_;  // 0 or 1: no version is at the start
  std::string_view rest_;
  std::deque<Node> nodes_;
  std::vector<Node*> stack_;
  std::map<uint64_t, Node*> memo_;

 public:
  [[noreturn]] void reject(const std::string& what) const { fail(what); }
};

std::string extension_of(const std::string& path) {
  std::string extension = std::filesystem::path(path).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return extension;
}
}  // namespace

bool has_state_dict_extension(const std::string& path) {
  const std::string extension = extension_of(path);
  return extension == ".pt" || extension == ".pth" || extension == ".bin" || extension == ".ckpt";
}

bool is_state_dict_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;
  if (has_state_dict_extension(path)) return true;
  if (extension_of(path) == ".safetensors") return false;
  std::array<char, 4> start{};
  std::ifstream(path, std::ios::binary).read(start.data(), start.size());
  return std::string_view(start.data(), start.size()) == "PK\x03\x04";
}

std::vector<PickledTensor> tensors_of_pickle(const std::string& file, std::string_view pickle) {
  Machine machine(file, pickle);
  const Node* dictionary = machine.run();
  for (const char* name : {"state_dict", "model"})
    if (dictionary->kind == Kind::dictionary)
      for (const auto& [key, value] : dictionary->entries)
        if (key->kind == Kind::text && key->text == name && value->kind == Kind::dictionary) {
          dictionary = value;
          break;
        }
  if (dictionary->kind != Kind::dictionary) machine.reject("contains no dictionary of tensors");
  std::vector<PickledTensor> tensors;
  std::set<std::string> names;
  for (const auto& [key, value] : dictionary->entries) {
    if (key->kind != Kind::text) machine.reject("the keys of its dictionary are not names");
    if (value->kind != Kind::tensor)
      machine.reject(fmt::format("the entry '{}' of its dictionary is not a tensor", printable(key->text)));
    if (!names.insert(key->text).second)
      machine.reject(fmt::format("its dictionary has the name '{}' twice", printable(key->text)));
    if (!value->metadata.empty())
      fail_user(
          fmt::format("{}: the tensor '{}' has the metadata '{}', which Zeroth cannot apply; save a tensor without "
                      "it, for example tensor.resolve_conj().clone()",
                      file, printable(key->text), printable(value->metadata)));
    tensors.push_back(value->tensor);
    tensors.back().name = key->text;
  }
  return tensors;
}

}  // namespace zr::host::checkpoint
