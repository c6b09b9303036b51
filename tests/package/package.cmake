# Installs Zeroth into a scratch folder, builds the quickstart against it with find_package and a plug-in against its
# SDK, and trains with both; also those that docs/ shows. cmake -DBUILD=... -DSOURCE=... -DSCRATCH=... -DNVCC=...
# -P package.cmake. NVCC: the compiler for CUDA of the build, or nothing.
include(${CMAKE_CURRENT_LIST_DIR}/commands.cmake)

# Writes the files that a page of docs/ shows: each is the code block that follows the first mention of its name.
function(extract page folder)
  file(READ ${SOURCE}/docs/${page} text)
  foreach(name ${ARGN})
    set(rest "${text}")
    foreach(mark "`${name}`" "```" "\n")
      string(FIND "${rest}" "${mark}" at)
      if(at EQUAL -1)
        message(FATAL_ERROR "docs/${page} shows no file ${name}")
      endif()
      string(LENGTH "${mark}" length)
      math(EXPR at "${at} + ${length}")
      string(SUBSTRING "${rest}" ${at} -1 rest)
    endforeach()
    string(FIND "${rest}" "\n```" end)
    string(SUBSTRING "${rest}" 0 ${end} block)
    file(WRITE ${folder}/${name} "${block}\n")
  endforeach()
endfunction()

file(REMOVE_RECURSE ${SCRATCH})
set(prefix ${SCRATCH}/prefix)
must(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})

# A user's program, built from the installed example.
set(cmake ${CMAKE_COMMAND} -G Ninja -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
set(project ${cmake} -DCMAKE_PREFIX_PATH=${prefix})
file(CREATE_LINK ${TORCH} ${SCRATCH}/torch SYMBOLIC)
must(${project} -DTORCH_ROOT=${SCRATCH}/torch -S ${prefix}/share/zeroth/examples/quickstart -B ${SCRATCH}/quickstart)
must(${CMAKE_COMMAND} --build ${SCRATCH}/quickstart)

# The program of docs/getting-started.md, built and trained as the page says.
set(page ${SCRATCH}/app)
extract(getting-started.md ${page} main.cpp CMakeLists.txt job.toml)
must(${project} -DTORCH_ROOT=${SCRATCH}/torch -S ${page} -B ${page}/build)
must(${CMAKE_COMMAND} --build ${page}/build)
file(COPY ${page}/build/app DESTINATION ${page})
must(${prefix}/bin/zeroth train ${page}/job.toml train.steps=100 job.runs="${SCRATCH}/runs")
must_say("step 100 loss")

# A program that does not call libtorch itself starts, also if the linker drops libraries that are not called.
set(small ${SCRATCH}/small)
file(WRITE ${small}/main.cpp "#include \"zr/program.hpp\"\nint main() { return zr::guarded([] {}); }\n")
file(WRITE ${small}/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)\nproject(Small LANGUAGES CXX)\n\
find_package(Zeroth 0.1 REQUIRED)\nadd_executable(small main.cpp)\ntarget_link_libraries(small Zeroth::zeroth)\n")
must(${project} -DTORCH_ROOT=${SCRATCH}/torch -DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed -S ${small} -B ${small}/build)
must(${CMAKE_COMMAND} --build ${small}/build)
must(${small}/build/small)
must(sh -c "c++ -std=c++20 -Wl,--as-needed ${small}/main.cpp -o ${small}/small \
$(PKG_CONFIG_PATH=${prefix}/lib/pkgconfig pkg-config --define-variable=torch_root=${TORCH} --cflags --libs zeroth)")
must(${small}/small)

# libtorch next to libzeroth.so is found without TORCH_ROOT. Checks the messages for a missing or different libtorch.
file(CREATE_LINK ${TORCH} ${prefix}/lib/libtorch SYMBOLIC)
must(${project} -S ${SOURCE}/examples/torchscript -B ${SCRATCH}/beside)
must_say("libtorch [0-9.]+: ${prefix}/lib/libtorch")
file(REMOVE ${prefix}/lib/libtorch)
set(quickstart -S ${SOURCE}/examples/quickstart -B ${SCRATCH}/no_torch)
file(STRINGS ${prefix}/lib/cmake/Zeroth/ZerothConfig.cmake wanted REGEX "set.ZR_TORCH_REQUIRED_VERSION")
string(REGEX MATCH "[0-9.]+" wanted "${wanted}")
set(advice "Set TORCH_ROOT to an unpacked libtorch ${wanted} (the folder that contains lib/ and include/), or put it, \
or a link to it, at ${prefix}/lib/libtorch. Plug-ins do not need libtorch: find_package(ZerothSdk 0.9).")
must_fail("libtorch was not found: TORCH_ROOT and Torch_DIR are not set, and there is no libtorch in \
${prefix}/lib/libtorch. ${advice}" ${project} ${quickstart})
must_fail("There is no libtorch in ${SCRATCH}/nowhere (TORCH_ROOT or Torch_DIR): lib/libtorch_cpu.so or the headers \
are missing. ${advice}" ${project} -DTORCH_ROOT=${SCRATCH}/nowhere ${quickstart})
file(WRITE ${SCRATCH}/old/lib/libtorch_cpu.so "")
file(WRITE ${SCRATCH}/old/include/torch/csrc/api/include/torch/torch.h "")
file(WRITE ${SCRATCH}/old/include/torch/csrc/api/include/torch/version.h
     "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 3\n#define TORCH_VERSION_PATCH 1\n")
must_fail("libtorch in ${SCRATCH}/old is version 2.3.1, but this Zeroth was built with ${wanted}, and libtorch \
" ${project} -DTORCH_ROOT=${SCRATCH}/old ${quickstart})
file(WRITE ${SCRATCH}/newer/CMakeLists.txt
     "cmake_minimum_required(VERSION 3.25)\nproject(Newer LANGUAGES CXX)\nfind_package(Zeroth 0.2 REQUIRED)\n")
must_fail("compatible with requested version \"0.2\"" ${project} -S ${SCRATCH}/newer -B ${SCRATCH}/newer/build)

# A plug-in, built with the sdk component only, and with pkg-config. The version of the SDK is that of the ABI.
must(${CMAKE_COMMAND} --install ${BUILD} --component sdk --prefix ${SCRATCH}/sdk)
foreach(asked 0.8 0.99 1.0)
  file(WRITE ${SCRATCH}/asks/CMakeLists.txt
       "cmake_minimum_required(VERSION 3.25)\nproject(Asks LANGUAGES CXX)\nfind_package(ZerothSdk ${asked} REQUIRED)\n")
  must_fail("compatible with requested version \"${asked}\"" ${cmake} -DCMAKE_PREFIX_PATH=${SCRATCH}/sdk
            -S ${SCRATCH}/asks -B ${SCRATCH}/asks/build)
endforeach()
if(EXISTS ${SCRATCH}/sdk/lib/libzeroth.so OR EXISTS ${SCRATCH}/sdk/bin/zeroth)
  message(FATAL_ERROR "the component sdk holds the engine")
endif()
set(conform ${SCRATCH}/sdk/bin/zeroth-conform)
must(ldd ${conform})
if(said MATCHES "torch|boost|fmt|stdc")
  message(FATAL_ERROR "zeroth-conform of the component sdk needs more than the C library:\n${said}")
endif()
file(GLOB_RECURSE sdk_files ${SCRATCH}/sdk/*)
set(sdk_bytes 0)
foreach(file ${sdk_files})
  file(SIZE ${file} bytes)
  math(EXPR sdk_bytes "${sdk_bytes} + ${bytes}")
endforeach()
if(sdk_bytes GREATER_EQUAL 4194304)
  message(FATAL_ERROR "the component sdk has ${sdk_bytes} bytes, not less than 4 MiB")
endif()
set(pinned ${SCRATCH}/sdk/share/zeroth/abi/0.9)
must(cc -std=c11 -fsyntax-only -I${pinned} ${pinned}/asserts.c)
must(${cmake} -DCMAKE_PREFIX_PATH=${SCRATCH}/sdk -S ${SOURCE}/tests/package/author -B ${SCRATCH}/author
     -DZR_ROUND_ROBIN=${SOURCE}/tests/multirank/plugins/round_robin.cpp)
must(${CMAKE_COMMAND} --build ${SCRATCH}/author)
set(page ${SCRATCH}/descent)  # the optimizer and the CMakeLists.txt of docs/
extract(writing-an-optimizer.md ${page} descent.cpp)
extract(writing-a-plugin.md ${page} CMakeLists.txt)
file(READ ${page}/CMakeLists.txt build)
string(REPLACE "acme.lion" "descent" build "${build}")
string(REPLACE "plugin.cpp" "descent.cpp" build "${build}")
file(WRITE ${page}/CMakeLists.txt "${build}")
must(${cmake} -DCMAKE_PREFIX_PATH=${SCRATCH}/sdk -S ${page} -B ${page}/build)
must(${CMAKE_COMMAND} --build ${page}/build)
must(${prefix}/bin/zeroth plugins ${page}/build/plugins/zr_optimizer_descent.so)
must_say("descent")
must(${conform} ${page}/build/plugins/zr_optimizer_descent.so)
include(${SOURCE}/tests/package/plugins.cmake)

# CUDA sources, the optimizer of docs/; nvcc only compiles here.
extract(writing-an-optimizer.md ${SCRATCH}/descent_device descent_device.cu)
set(file ${SCRATCH}/descent_device/descent_device.cu)
set(cuda ${cmake} -DCMAKE_PREFIX_PATH=${SCRATCH}/sdk -S ${SOURCE}/tests/package/cuda -B)
must_fail("descent_device.cu is a CUDA file, but the project does not enable this language: add CUDA to project(... \
LANGUAGES ...)" ${cuda} ${SCRATCH}/cuda_language -DCUDA=OFF -DSOURCES=${file})
must_fail("KERNELS_OF names \"lion\", but no plug-in of this name with KERNELS was added"
          ${cuda} ${SCRATCH}/kernels_of -DCUDA=OFF -DSOURCES=${page}/descent.cpp -DKERNELS_OF=lion)
if(NVCC)
  list(INSERT cuda 1 -DCMAKE_CUDA_COMPILER=${NVCC})
  must_fail("has a CUDA file, but KERNELS are compiled once per instruction set of the CPU"
            ${cuda} ${SCRATCH}/cuda_kernels -DCUDA=ON -DSOURCES=${page}/descent.cpp -DKERNELS=${file})
  must(${cuda} ${SCRATCH}/cuda -DCUDA=ON -DSOURCES=${file})
  must(${CMAKE_COMMAND} --build ${SCRATCH}/cuda)
  must(${prefix}/bin/zeroth plugins ${SCRATCH}/cuda/plugins/cuda/zr_optimizer_plain_descent.so)
  must_say("optimizer 'plain_descent'")
  must_not_say("warning")
else()
  message("skipped: no CUDA file is compiled, because the build has no compiler for CUDA (.ci/setup cuda)")
endif()
must_fail("was installed without its engine"  ${cmake} -DCMAKE_PREFIX_PATH=${SCRATCH}/sdk -DTORCH_ROOT=${TORCH}
          -S ${SOURCE}/examples/quickstart -B ${SCRATCH}/sdk_alone)
find_program(pkg_config pkg-config REQUIRED)
set(pc ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${prefix}/lib/pkgconfig ${pkg_config})
must(${pc} --exact-version=0.9 zeroth-sdk)
execute_process(COMMAND ${pc} --cflags --libs zeroth-sdk OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE)
separate_arguments(flags)
set(by_hand ${SCRATCH}/by_hand/zr_strategy_round_robin.so)
file(MAKE_DIRECTORY ${SCRATCH}/by_hand)
must(c++ -std=c++17 -O2 ${SOURCE}/tests/multirank/plugins/round_robin.cpp ${flags} -o ${by_hand})
must(chmod go-w ${by_hand} ${SCRATCH}/by_hand)
must(${prefix}/bin/zeroth plugins ${by_hand})
must_say("strategy 'round_robin'")
must_not_say("warning")
execute_process(COMMAND ${pc} --define-variable=torch_root=${TORCH} --cflags --libs zeroth
                OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE)
set(engine_flags "${flags}")
foreach(part -I${prefix}/lib/pkgconfig/../../include "-isystem ${TORCH}/include" -L${prefix}/lib/pkgconfig/../../lib
        -lzeroth -ltorch_cpu)
  string(FIND "${flags}" "${part}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "pkg-config gives '${flags}', without ${part}")
  endif()
endforeach()

# The C++ of README.md and of docs/ compiles; snippets.hpp declares what the fragments leave out.
set(here ${SOURCE}/tests/package)
execute_process(COMMAND awk -f ${here}/snippets.awk ${SOURCE}/README.md ${SOURCE}/docs/getting-started.md
                        ${SOURCE}/docs/training-from-cpp.md
                OUTPUT_FILE ${SCRATCH}/snippets.cpp COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(engine_flags)
must(c++ -std=c++20 -fsyntax-only ${engine_flags} -I${here} ${SCRATCH}/snippets.cpp)

# Moves the installation: a program linked before still runs and reports the library it uses; find_package finds it.
file(RENAME ${prefix} ${SCRATCH}/moved)
set(prefix ${SCRATCH}/moved)
must(${cmake} -DCMAKE_PREFIX_PATH=${prefix} -DTORCH_ROOT=${TORCH} -S ${SOURCE}/examples/quickstart -B ${SCRATCH}/again)
set(train ${prefix}/bin/zeroth launch -n 2 -- ${SCRATCH}/quickstart/quickstart
          ${SOURCE}/examples/quickstart/quickstart.toml train.steps=100 job.runs="${SCRATCH}/runs")
must(${train} job.name=zero1)
must_say("step 100 loss")
must_say("quickstart was linked to libzeroth.so.0 in another folder; using the one in ${prefix}/lib")
must(${CMAKE_COMMAND} -E env ZR_PLUGIN_PATH=${SCRATCH}/author/plugins ${train} job.name=round_robin
     strategy=round_robin)
foreach(name zero1 round_robin)
  file(READ ${SCRATCH}/runs/${name}/summary.json summary)
  string(JSON hash_${name} GET "${summary}" weights_hash)
endforeach()
if(NOT hash_zero1 STREQUAL hash_round_robin)
  message(FATAL_ERROR "the author's strategy gave other weights: ${hash_round_robin}, not ${hash_zero1}")
endif()
# Removes libtorch from where the program was linked; then puts it next to libzeroth.so of the moved installation.
file(REMOVE ${SCRATCH}/torch)
must_fail("were not found: libtorch_cpu.so, libc10.so" ${train} job.name=no_torch)
must_fail("beside libzeroth.so" ${train} job.name=no_torch)
file(CREATE_LINK ${TORCH} ${prefix}/lib/libtorch SYMBOLIC)
must(${train} job.name=beside)
file(REMOVE_RECURSE ${SCRATCH})
