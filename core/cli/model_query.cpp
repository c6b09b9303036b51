#include "cli/model_query.hpp"

#include <iostream>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/tensor_file.hpp"
#include "cli/trainer.hpp"
#include "engine/budget.hpp"
#include "engine/planning.hpp"

namespace zr::host::cli {

config::Document ModelQuery::document(const std::vector<std::string>& more) const {
  std::vector<std::string> all = options_.overrides;
  all.insert(all.end(), more.begin(), more.end());
  return options_.file.empty() ? config::Document::parse("", command_, all)
                               : config::Document::load(options_.file, all);
}

plugin::ResolvedJob ModelQuery::resolved_job(const std::vector<std::string>& more, int world) const {
  return resolve_job(document(more), registry_, own_, world, options_.run);
}

// Queries the program's keys, and with `for_parameters` also its parameters. Returns 0 or the program's exit code.
int ModelQuery::ask_program(const std::filesystem::path& bin, bool for_parameters) {
  const config::Setting<std::string> program = document({}).program();
  if (program->empty() && !for_parameters) return 0;
  if (!options_.run) {
    if (for_parameters)
      fail_user(command_ +
                ": no model is given: with --no-run the program is not started; add --safetensors FILE or --params N");
    return 0;
  }
  const std::filesystem::path trainer = find_trainer(program, options_.file, bin);
  const std::string where = location_of_program(program);
  own_ = ask_keys(trainer, options_.file, where);
  if (!for_parameters) return 0;
  resolved_job({}, ranks());  // reports errors in the file before the program builds its model
  std::vector<std::string> argv{trainer.string(), options_.file};
  argv.insert(argv.end(), options_.overrides.begin(), options_.overrides.end());
  Answer answer = ask_parameters(argv, where);
  std::cerr << printable(answer.stderr_text, "\n\t");
  parameters_ = std::move(answer.parameters);
  return answer.code;
}

int ModelQuery::resolve(const std::filesystem::path& bin) {
  if (!options_.tensors.empty() && options_.sized())
    fail_user(command_ + ": --safetensors defines the model; remove --params, --layers and --hidden");
  const bool of_program = options_.tensors.empty() && !options_.sized();
  if (options_.file.empty() && of_program)
    fail_user(command_ + ": no model is given; give a job's FILE.toml, --safetensors FILE, or --params N");
  if (!options_.file.empty())
    if (const int code = ask_program(bin, of_program)) return code;
  if (!options_.tensors.empty()) {
    TensorFile file = read_safetensors(options_.tensors);
    parameters_ = std::move(file.parameters);
    // The default of train.dtype is the dtype of the files.
    if (file.dtype != ZR_NONE && !resolved_job({}, ranks()).config.train().dtype.given())
      options_.overrides.push_back("train.dtype=" + std::string(name_of(file.dtype)));
  } else if (options_.sized()) {
    const plan::Sizes sizes = complete(options_.sizes);
    parameters_ = parameters_of(sizes);
    model_ = "GPT: " + std::to_string(sizes.layers) + (sizes.layers == 1 ? " layer" : " layers") + ", hidden size " +
             std::to_string(sizes.width) + "\n";
  }
  return 0;
}

}  // namespace zr::host::cli
