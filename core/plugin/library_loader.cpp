#include "plugin/library_loader.hpp"

#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <boost/dll/shared_library.hpp>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>

#include "base/error.hpp"
#include "base/file.hpp"
#include "plugin/elf.hpp"
#include "plugin/float_environment.hpp"
#include "plugin/probe.hpp"
#include "zr/mutex.hpp"

namespace zr::host::plugin {

namespace {

constexpr std::string_view kTag = "zr_tag_";

constexpr AbiVersion kHost{ZR_ABI_MAJOR, ZR_ABI_MINOR};

std::string text_of(const AbiVersion& version) { return fmt::format("{}.{}", version.major, version.minor); }

// Checks, before the file is read, that it is trusted and that this process may read it.
std::string access_problem(const std::filesystem::path& file, TrustedFile& found, Rejection& cause) {
  std::error_code error;
  cause.cause = RejectionCause::bad_path;
  if (!file.is_absolute()) return "the path is relative; write an absolute one";
  if (!std::filesystem::exists(std::filesystem::symlink_status(file, error))) return "there is no such file";
  cause = {};
  std::string problem = trust_problem(file, found, &cause);
  if (!problem.empty()) return problem;
  if (::access(found.path.c_str(), R_OK) == 0) return "";
  cause = {RejectionCause::unreadable, {found.path.string()}};
  return fmt::format("it cannot be read: {}: chmod +r {}", std::strerror(errno), found.path.string());
}

// Parses "0_9".
std::optional<AbiVersion> parse_version(std::string_view text) {
  AbiVersion version;
  const auto end = text.data() + text.size();
  auto [at, error] = std::from_chars(text.data(), end, version.major);
  if (error != std::errc() || at == end || *at != '_') return {};
  const auto last = std::from_chars(at + 1, end, version.minor);
  return last.ec == std::errc() && last.ptr == end ? std::optional(version) : std::nullopt;
}

std::string abi_problem(const AbiVersion& needed, const std::optional<AbiVersion>& drafts, RejectionCause& cause) {
  const std::string here = text_of(kHost);
  cause = RejectionCause::other_drafts;
  if (drafts && !(*drafts == kHost))
    return fmt::format(
        "it uses draft headers of plug-in ABI {}, and this zeroth has {}: build the plug-in again for this zeroth, or "
        "install the zeroth that it was built for",
        text_of(*drafts), here);
  cause = RejectionCause::none;
  if (loads(kHost, needed, drafts.has_value())) return "";
  cause = kHost < needed ? RejectionCause::abi_too_new : RejectionCause::abi_too_old;
  return fmt::format(
      "it needs plug-in ABI {}, this zeroth has {}: {}{}", text_of(needed), here,
      kHost < needed ? "install a newer zeroth, or a plug-in built for ABI " : "install a plug-in built for ABI ",
      here);
}

// What the names of the tags say, in addition to roles, ids and several_hosts of Tags.
struct TagNames {
  std::optional<AbiVersion> needed, drafts;
  std::string newer_kind;  // of a known role, with an unknown revision: "zr.optimizer/2"
};

// `name`: without kTag. Reads tags that name the role: "kind_optimizer_1", "id_optimizer_ID".
void parse_tag_of_role(std::string_view name, Role role, Tags& tags, TagNames& names) {
  const std::string start = fmt::format("kind_{}_", name_of(role)), id = fmt::format("id_{}_", name_of(role));
  if (name.substr(0, id.size()) == id) tags.ids.emplace_back(role, name.substr(id.size()));
  if (name == start + "1")
    tags.roles.push_back(role);
  else if (name.substr(0, start.size()) == start)
    names.newer_kind = fmt::format("zr.{}/{}", name_of(role), name.substr(start.size()));
}

TagNames parse_tags(const std::vector<std::string>& symbols, Tags& tags) {
  TagNames names;
  for (std::string_view name : symbols) {
    if (name.substr(0, kTag.size()) != kTag) continue;
    name.remove_prefix(kTag.size());
    if (name == "several_hosts") tags.several_hosts = true;
    if (name.substr(0, 4) == "abi_")
      if (const auto version = parse_version(name.substr(4)); version && (!names.needed || *names.needed < *version))
        names.needed = version;
    if (name.substr(0, 6) == "draft_")
      if (const AbiVersion version = parse_version(name.substr(6)).value_or(AbiVersion{});
          !names.drafts || *names.drafts == kHost)
        names.drafts = version;
    for (const Role role : kRoles) parse_tag_of_role(name, role, tags, names);
  }
  return names;
}

struct Library {
  boost::dll::shared_library library;
  const zr_module* module;  // null if it could not be read
  std::string problem;      // then: why
  uint64_t file_hash;
};

// The result of loading a file in a child process.
struct ProbeResult {
  std::string problem;  // "" if there is none
  RejectionCause cause = RejectionCause::none;
};

// The libraries of this process; never destroyed, so that none is unloaded.
struct Loaded {
  Mutex mutex;
  bool probes ZR_GUARDED_BY(mutex) = false;
  std::map<std::pair<dev_t, ino_t>, ProbeResult> probed ZR_GUARDED_BY(mutex);
  std::map<std::filesystem::path, Library> libraries ZR_GUARDED_BY(mutex);
};
Loaded& loaded() {
  static auto* loaded = new Loaded;
  return *loaded;
}

uint64_t hash_of_file(const std::filesystem::path& path) {
  const File file(path.string(), File::Mode::read);
  std::string bytes(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, bytes.data(), std::ssize(bytes));
  return XXH3_64bits(bytes.data(), bytes.size());
}

// The cause of an error of dlopen(). The dynamic loader reports no code, only a text, which glibc does not translate
// because no code of ours sets a locale.
Rejection loader_rejection(const std::filesystem::path& file, const std::string& text) {
  struct statvfs info {};
  if (::statvfs(file.c_str(), &info) == 0 && (info.f_flag & ST_NOEXEC))
    return {RejectionCause::noexec, {file.string()}};
  const auto end = text.find(": cannot open shared object file");
  if (end == text.npos || text.compare(0, end, file.string()) == 0) return {RejectionCause::unloadable};
  return {RejectionCause::missing_library, {text.substr(0, end)}};
}

std::string install_hint(const Rejection& rejection) {
  const std::string package =
      rejection.cause == RejectionCause::missing_library ? debian_package_of(rejection.subjects.front()) : "";
  return package.empty() ? "" : fmt::format(" (Debian 12: {})", package);
}

const zr_module* enter(boost::dll::shared_library& library, std::string& problem) {
  if (!library.has("zr_module_v1")) {
    problem = "it does not export zr_module_v1; build it with zr_add_plugin() and ZR_MODULE (sdk/include/zr)";
    return nullptr;
  }
  try {
    const zr_module* module = library.get<const zr_module*(uint32_t)>("zr_module_v1")(ZR_ABI_MINOR);
    if (!module) problem = "zr_module_v1 returned null; this is a bug in the plug-in";
    return module;
  } catch (const std::exception& error) {
    problem = fmt::format("zr_module_v1 threw an exception: {}; this is a bug in the plug-in", error.what());
  } catch (...) {
    problem = "zr_module_v1 threw an exception; this is a bug in the plug-in";
  }
  return nullptr;
}

}  // namespace

std::string debian_package_of(const std::string& library) {
  static constexpr std::pair<std::string_view, const char*> kPackages[] = {
      {"libfmt.so.9", "libfmt9"},           {"libgomp.so.1", "libgomp1"},     {"libibverbs.so.1", "libibverbs1"},
      {"libmpi.so.40", "libopenmpi3"},      {"libmpich.so.12", "libmpich12"}, {"libnuma.so.1", "libnuma1"},
      {"librdmacm.so.1", "librdmacm1"},     {"libucp.so.0", "libucx0"},       {"liburing.so.2", "liburing2"},
      {"libxxhash.so.0", "libxxhash0"},     {"libzstd.so.1", "libzstd1"},     {"libstdc++.so.6", "libstdc++6"},
      {"libopenblas.so.0", "libopenblas0"}, {"libtbb.so.12", "libtbb12"}};
  for (const auto& [name, package] : kPackages)
    if (name == library) return package;
  return "";
}

Tags read_tags(const std::filesystem::path& file) {
  Tags tags;
  tags.rejection = access_problem(file, tags.file, tags.cause);
  if (!tags.rejection.empty()) return tags;
  const auto symbols = exported_symbols(tags.file.path, "zrabi");
  if (!symbols) {
    tags.cause.cause = RejectionCause::not_a_library;
    tags.rejection =
        "it is not a shared library for this machine; name one built with zr_add_plugin() (sdk/cmake/ZrPlugin.cmake)";
    return tags;
  }
  const TagNames names = parse_tags(*symbols, tags);
  tags.needed = names.needed.value_or(AbiVersion{});
  tags.drafts = names.drafts.has_value();
  if (!names.needed) {
    tags.cause.cause = RejectionCause::not_a_plugin;
    tags.rejection =
        "it is not a Zeroth plug-in (no ABI tag); build it with zr_add_plugin() and ZR_MODULE (sdk/include/zr)";
  } else if (tags.rejection = abi_problem(*names.needed, names.drafts, tags.cause.cause);
             tags.rejection.empty() && tags.roles.empty()) {
    tags.cause.cause = RejectionCause::unknown_role;
    tags.rejection = names.newer_kind.empty()
                         ? "it has no tag of a role that this zeroth knows: strategy, communicator, optimizer or "
                           "offload; install a newer zeroth"
                         : fmt::format("it contains only a {}, which this zeroth does not know; install a newer zeroth",
                                       names.newer_kind);
  }
  return tags;
}

namespace {

zr_multiply_add multiply_add_of(const boost::dll::shared_library& library) {
  return library.has("zr_tag_multiply_add") ? library.get<const zr_multiply_add>("zr_tag_multiply_add") : nullptr;
}

bool is_optimizer(const Tags& tags) {
  return std::find(tags.roles.begin(), tags.roles.end(), Role::optimizer) != tags.roles.end();
}

// Loads the library, reads its tables as load_library() does, and calls what build_warnings() calls.
std::string try_to_load(const std::filesystem::path& file, const Tags& tags) {
  boost::dll::fs::error_code error;
  static auto& library = *new boost::dll::shared_library;  // never destroyed: the child process exits first
  library.load(file, error, boost::dll::load_mode::rtld_now | boost::dll::load_mode::rtld_local);
  std::string problem;
  const zr_module* module = error ? nullptr : enter(library, problem);
  if (module && is_optimizer(tags)) multiply_add_warning(multiply_add_of(library));
  return module ? module_problem(module, tags) : problem;
}

const ProbeResult& probe(Loaded& process, const Tags& tags) ZR_REQUIRES(process.mutex) {
  const auto [at, fresh] = process.probed.try_emplace({tags.file.device, tags.file.inode});
  ProbeResult& result = at->second;
  if (fresh && process.probes)
    result.problem = probe_problem([&] { try_to_load(tags.file.path, tags); }, &result.cause, tags.file.path.string());
  return result;
}

}  // namespace

void probe_before_loading() {
  Loaded& process = loaded();
  const MutexLock lock(process.mutex);
  process.probes = true;
}

namespace {

// Loads a file that this process has not loaded, and adds it to its libraries, also if its module cannot be used.
// Returns the end of the libraries if it cannot be loaded; the reason is in `validation`.
auto load_file(Loaded& process, const Tags& tags, PluginValidation& validation) ZR_REQUIRES(process.mutex) {
  const auto& key = tags.file.path;
  RejectionCause& cause = validation.rejection.cause;
  const ProbeResult& probed = probe(process, tags);
  validation.reason = probed.problem;
  cause = probed.cause;
  if (!validation.reason.empty()) return process.libraries.end();
  uint64_t file_hash = 0;
  try {
    file_hash = hash_of_file(key);
  } catch (const Error& failure) {
    validation.reason = failure.what();
    cause = RejectionCause::unreadable;
    return process.libraries.end();
  }
  const FloatEnvironmentGuard environment;
  boost::dll::fs::error_code error;
  boost::dll::shared_library library(key, error, boost::dll::load_mode::rtld_now | boost::dll::load_mode::rtld_local);
  if (error) {
    const char* text = ::dlerror();
    const std::string reason = text ? text : error.message();
    validation.rejection = loader_rejection(key, reason);
    validation.reason = fmt::format("it cannot be loaded: {}; install what it needs{}, or build it for this machine",
                                    reason, install_hint(validation.rejection));
    return process.libraries.end();
  }
  const zr_module* module = enter(library, validation.reason);
  if (const std::string change = environment.change(); module && !change.empty()) {
    validation.reason = fmt::format(
        "loading it changes how this process computes: {}; compile and link it without -ffast-math, -Ofast and "
        "-funsafe-math-optimizations",
        change);
    module = nullptr;
  }
  if (!is_unchanged(tags.file)) {
    validation.reason = "it was replaced while it was being loaded; start again";
    cause = RejectionCause::replaced;
    module = nullptr;
  }
  return process.libraries.emplace(key, Library{std::move(library), module, validation.reason, file_hash}).first;
}

}  // namespace

PluginValidation load_library(const std::filesystem::path& file, const Tags& tags) {
  PluginValidation validation{file, false, tags.rejection, {}};
  validation.rejection = tags.cause;
  if (!validation.reason.empty()) return validation;
  RejectionCause& cause = validation.rejection.cause;
  Loaded& process = loaded();
  const MutexLock lock(process.mutex);
  const auto& key = tags.file.path;
  auto at = process.libraries.find(key);
  if (at == process.libraries.end()) {
    at = load_file(process, tags, validation);
    if (at == process.libraries.end()) return validation;
  }
  const zr_module* module = at->second.module;
  validation.reason = at->second.problem;
  if (validation.reason.empty()) validation.reason = module_problem(module, tags);
  if (!validation.reason.empty()) {
    if (cause == RejectionCause::none) cause = RejectionCause::plugin_bug;
    return validation;
  }
  validation.accepted = true;
  for (uint32_t i = 0; i < module->n_components; ++i)
    for (const Role role : kRoles)
      if (abi_kind_of(role) == module->components[i]->kind)
        validation.components.push_back({module->components[i], module, file, tags.drafts});
  return validation;
}

std::vector<std::string> build_warnings(const PluginValidation& validation) {
  std::vector<std::string> warnings;
  if (validation.components.empty()) return warnings;
  const zr_module* module = validation.components.front().module;
  if (std::string warning = exports_warning(validation.file); !warning.empty()) warnings.push_back(std::move(warning));
  const bool updates = std::any_of(validation.components.begin(), validation.components.end(),
                                   [](const auto& one) { return abi_kind_of(Role::optimizer) == one.table->kind; });
  Loaded& process = loaded();
  const MutexLock lock(process.mutex);
  for (const auto& [path, library] : process.libraries) {
    if (library.module != module || !updates) continue;
    if (library.library.has("zr_tag_fast_math"))
      warnings.push_back(
          "it is compiled with -ffast-math, so the compiler may change the order of additions, and its updates may "
          "depend on how parameters are cut; compile it without -ffast-math and -Ofast");
    std::string warning = multiply_add_warning(multiply_add_of(library.library));
    if (!warning.empty()) warnings.push_back(std::move(warning));
  }
  return warnings;
}

uint64_t loaded_file_hash(const Component& component) {
  Loaded& process = loaded();
  const MutexLock lock(process.mutex);
  const auto found = std::find_if(process.libraries.begin(), process.libraries.end(),
                                  [&](const auto& entry) { return entry.second.module == component.module; });
  if (found == process.libraries.end())
    fail_internal(fmt::format("{}: this process did not load the library", component.file.string()));
  return found->second.file_hash;
}

}  // namespace zr::host::plugin
