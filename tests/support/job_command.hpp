// Runs the command line of a job for multi-rank tests.
#pragma once

#include <map>
#include <string>

#include "support/shell.hpp"

namespace zr::test {

/// Runs `command` in `folder` with the variables `environment`; returns its exit code and output.
///
/// Most commands are only `[NAME=value ...] zeroth launch ... -- PROGRAM --rank BODY ...` with the program of the test.
/// This function runs them without a shell: it calls the launcher's code in a child process, and the ranks are forks of
/// that process instead of new programs. The operator registrations of libtorch take about 0.3 s at the start of each
/// new program, which is most of the time of a short test. All other commands (with pipes, limits, other programs)
/// run in a shell. So do all commands if the test program is sanitized, because only programs that end normally check
/// for leaks; if it has threads, which a fork would not have; and if the test has failed, because the ranks would
/// inherit the failure.
///
/// With ZR_TEST_HOSTS=N in the environment, such jobs of several ranks run over MPI, on N hosts that the ranks pretend
/// to be on, unless they name a communicator or a device.
testing::Outcome run_job_command(const std::string& command, const std::string& folder,
                                 const std::map<std::string, std::string>& environment = {});

/// Makes exit() end the process without the destructors of the static objects that exist now, in particular of
/// libtorch's operators, which take 0.1 s. exit() still runs those of later objects, which leave the job. Has no effect
/// if the program is sanitized.
void skip_earlier_destructors();

/// Runs a rank body in this process: the arguments after --rank. Returns the exit code.
int run_rank_body(const std::vector<std::string>& arguments);

}  // namespace zr::test
