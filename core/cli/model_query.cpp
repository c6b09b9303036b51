#include "cli/model_query.hpp"

#include <fmt/format.h>

#include <iostream>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/tensor_file.hpp"
#include "cli/trainer.hpp"

namespace zr::host::cli {

config::Document ModelQuery::document(const std::vector<std::string>& extra_overrides) const {
  std::vector<std::string> overrides = options_.overrides;
  overrides.insert(overrides.end(), extra_overrides.begin(), extra_overrides.end());
  config::Document document = options_.file.empty() ? config::Document::parse("", command_, overrides)
                                                    : config::Document::load(options_.file, overrides);
  if (options_.hosts.size() > 1) document.set_several_hosts();
  return document;
}

job::HostSizes ModelQuery::hosts(int ranks) const {
  if (!options_.hosts.empty()) return options_.hosts;
  return options_.ranks == 0 ? job::HostSizes{ranks} : job::HostSizes{};
}

plugin::ResolvedJob ModelQuery::resolved_job(const std::vector<std::string>& extra_overrides, int world) const {
  return resolve_job(document(extra_overrides), registry_, program_keys_, world, options_.run);
}

// Queries the program's keys, and with `for_parameters` also its parameters. Returns 0 or the program's exit code.
int ModelQuery::query_program(const std::filesystem::path& bin, bool for_parameters) {
  const config::Setting<std::string> program = document({}).program();
  if (program->empty() && !for_parameters) return 0;
  if (!options_.run) {
    if (for_parameters)
      fail_user(command_ +
                ": no model is given: with --no-run the program is not started; add --safetensors FILE or --params N");
    return 0;
  }
  const std::filesystem::path trainer = find_trainer(program, options_.file, bin);
  const std::string location = location_of_program(program);
  program_keys_ = query_keys(trainer, options_.file, location);
  if (!for_parameters) return 0;
  resolved_job({}, ranks());  // reports errors in the file before the program builds its model
  std::vector<std::string> argv{trainer.string(), options_.file};
  argv.insert(argv.end(), options_.overrides.begin(), options_.overrides.end());
  Answer answer = query_parameters(argv, location);
  std::cerr << printable(answer.stderr_text, "\n\t");
  parameters_ = std::move(answer.parameters);
  return answer.code;
}

int ModelQuery::resolve(const std::filesystem::path& bin) {
  if (!options_.tensors.empty() && options_.sized())
    fail_user(command_ + ": --safetensors defines the model; remove --params, --layers and --hidden");
  const bool from_program = options_.tensors.empty() && !options_.sized();
  if (options_.file.empty() && from_program)
    fail_user(command_ + ": no model is given; give a job's FILE.toml, --safetensors FILE, or --params N");
  if (!options_.file.empty())
    if (const int code = query_program(bin, from_program)) return code;
  if (!options_.tensors.empty()) {
    TensorFile file = read_safetensors(options_.tensors);
    parameters_ = std::move(file.parameters);
    // The default of train.dtype is the dtype of the files.
    if (file.dtype != ZR_NONE && !resolved_job({}, ranks()).config.train().dtype.given())
      options_.overrides.push_back(fmt::format("train.dtype={}", name_of(file.dtype)));
  } else if (options_.sized()) {
    const plan::Sizes sizes = complete(options_.sizes);
    parameters_ = parameters_of(sizes);
    model_ =
        fmt::format("GPT: {}{}, hidden size {}\n", sizes.layers, sizes.layers == 1 ? " layer" : " layers", sizes.width);
  }
  return 0;
}

}  // namespace zr::host::cli
