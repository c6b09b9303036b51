# Installs Zeroth, writes a project of each role with `zeroth new`, in C++ and in C, builds it with gcc and with clang
# from the SDK alone, checks it with zeroth-conform, and trains two ranks with it. The weights are those of the plug-ins
# of Zeroth with the same arithmetic.
# cmake -DBUILD=... -DSOURCE=... -DSCRATCH=... -DTORCH=... -DLAUNCHER=... -P templates.cmake
include(${CMAKE_CURRENT_LIST_DIR}/commands.cmake)

file(REMOVE_RECURSE ${SCRATCH})
set(prefix ${SCRATCH}/prefix)
set(sdk ${SCRATCH}/sdk)
must(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
must(${CMAKE_COMMAND} --install ${BUILD} --component sdk --prefix ${sdk})
set(zeroth ${prefix}/bin/zeroth)

# Trains a few steps with a job file, and sets `hash` to the hash of the weights.
function(train hash name file)
  must(${CMAKE_COMMAND} -E env ZR_PLUGIN_PATH=${SCRATCH}/${name}/build/plugins ${zeroth} train ${file} ${ARGN}
       "job.program=\"${BUILD}/bin/quickstart\"" job.threads=1 job.ranks=2 job.name=${name}
       "job.runs=\"${SCRATCH}/runs\"" train.steps=10 train.micro_batch=16 train.global_batch=64)
  file(READ ${SCRATCH}/runs/${name}/summary.json summary)
  string(JSON value GET "${summary}" weights_hash)
  set(${hash} ${value} PARENT_SCOPE)
endfunction()

set(quickstart ${SOURCE}/examples/quickstart/quickstart.toml)
train(adamw adamw ${quickstart})
train(sgd sgd ${quickstart} optimizer.use=sgd optimizer.lr=0.01 optimizer.sgd.momentum=0.9)
set(expected_optimizer ${sgd})
set(expected_strategy ${adamw})
set(expected_communicator ${adamw})
set(expected_offload ${adamw})

set(flags "-Wall -Wextra -Werror")
foreach(role optimizer strategy communicator offload)
  foreach(language cpp c)
    set(option "")
    if(language STREQUAL "c")
      set(option --c)
    endif()
    foreach(compilers "gcc,g++" "clang,clang++")
      string(REGEX MATCH "^[^,]*" cc ${compilers})
      string(REGEX MATCH "[^,]*$" cxx ${compilers})
      set(name ${role}-${language}-${cc})
      set(project ${SCRATCH}/${name})
      must(${zeroth} new ${role} acme.mine ${project} ${option})
      must(${CMAKE_COMMAND} -G Ninja -S ${project} -B ${project}/build -DCMAKE_PREFIX_PATH=${sdk}
           -DCMAKE_C_COMPILER=${cc} -DCMAKE_CXX_COMPILER=${cxx} -DCMAKE_C_FLAGS=${flags} -DCMAKE_CXX_FLAGS=${flags}
           -DCMAKE_C_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
      must(${CMAKE_COMMAND} --build ${project}/build)
      must(${zeroth} plugins ${project}/build/plugins/zr_${role}_acme.mine.so)
      must_say("${role} 'acme.mine'")
      must_not_say("warning")
      if(cc STREQUAL "gcc")
        must(${sdk}/bin/zeroth-conform ${project}/build/plugins/zr_${role}_acme.mine.so)
      endif()
      train(hash ${name} ${project}/job.toml)
      if(NOT hash STREQUAL expected_${role})
        message(FATAL_ERROR "${name}: the hash of the weights is ${hash}, not ${expected_${role}}")
      endif()
    endforeach()
  endforeach()
endforeach()

# The commands of a project's README.md, as they are printed there.
must(${zeroth} new optimizer acme.steps ${SCRATCH}/steps)
file(STRINGS ${SCRATCH}/steps/README.md lines REGEX "^    ")
list(JOIN lines "\n" script)
string(REPLACE "/path/to/libtorch" "${TORCH}" script "${script}")
file(WRITE ${SCRATCH}/steps.sh "set -e\ncd ${SCRATCH}/steps\n${script}\n")
must(${CMAKE_COMMAND} -E env "PATH=${prefix}/bin:$ENV{PATH}" sh ${SCRATCH}/steps.sh)
must_say("optimizer 'acme.steps'")
must_say("step 100/100")
file(REMOVE_RECURSE ${SCRATCH})
