# Installs Zeroth into a scratch folder and checks the installed files.
# cmake -DBUILD=... -DSOURCE=... -DSCRATCH=... -DTORCH=... -P install.cmake
include(${CMAKE_CURRENT_LIST_DIR}/commands.cmake)

file(REMOVE_RECURSE ${SCRATCH})
set(prefix ${SCRATCH}/prefix)
must(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
file(GLOB built RELATIVE ${BUILD}/plugins ${BUILD}/plugins/*.so)
file(GLOB installed RELATIVE ${prefix}/lib/zeroth/plugins ${prefix}/lib/zeroth/plugins/*.so)
if(NOT installed STREQUAL built)
  message(FATAL_ERROR "the plug-ins installed are '${installed}', those built are '${built}'")
endif()

# What `make train` builds has all files of the build that are installed.
execute_process(COMMAND ninja -C ${BUILD} -t query zr_training OUTPUT_VARIABLE training COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${BUILD}/cmake_install.cmake lines REGEX "${BUILD}/(bin|lib|plugins)/")
foreach(line ${lines})
  string(REGEX MATCH "${BUILD}/((bin|lib|plugins)/[^\"]*)\"" path "${line}")
  set(file "${CMAKE_MATCH_1}")
  # plugins/lib*: a plug-in's own command makes what it brings along.
  if(NOT path OR IS_DIRECTORY ${BUILD}/${file} OR file MATCHES "cmake_install.cmake$|^plugins/lib")
    continue()
  endif()
  string(REGEX REPLACE "([.]so)[.0-9]+$" "\\1" target ${file})
  string(FIND "${training}" " ${target}\n" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "${file} is installed, but zr_training does not build it")
  endif()
endforeach()

# Each component installs by itself, and find_package(Zeroth) finds the engine without the SDK.
foreach(component sdk engine)
  must(${CMAKE_COMMAND} --install ${BUILD} --component ${component} --prefix ${SCRATCH}/${component})
endforeach()
if(EXISTS ${SCRATCH}/engine/lib/cmake/ZerothSdk OR EXISTS ${SCRATCH}/sdk/lib/libzeroth.so)
  message(FATAL_ERROR "a component holds the files of the other")
endif()
file(WRITE ${SCRATCH}/finds/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)\nproject(Finds LANGUAGES CXX)\n\
find_package(Zeroth 0.1 REQUIRED)\nadd_executable(finds finds.cpp)\ntarget_link_libraries(finds Zeroth::zeroth)\n")
file(WRITE ${SCRATCH}/finds/finds.cpp "#include \"zr/program.hpp\"\nint main() { return zr::guarded([] {}); }\n")
must(${CMAKE_COMMAND} -G Ninja -DCMAKE_PREFIX_PATH=${SCRATCH}/engine -DTORCH_ROOT=${TORCH} -S ${SCRATCH}/finds
     -B ${SCRATCH}/finds/build)
must(${CMAKE_COMMAND} --build ${SCRATCH}/finds/build)
must(${SCRATCH}/finds/build/finds)
# An installation whose programs find libtorch has no problem.
must(${SCRATCH}/engine/bin/zeroth doctor)
must_say("programs that link libtorch find it by themselves")

# All files that users need are installed; no file contains build paths or debug information.
foreach(file share/doc/zeroth/LICENSE share/doc/zeroth/README.md share/doc/zeroth/SECURITY.md
        share/doc/zeroth/CHANGELOG.md
        share/doc/zeroth/sdk/README.md share/doc/zeroth/sdk/CHANGELOG.md share/zeroth/examples/quickstart/quickstart.cpp
        share/zeroth/examples/gpt/gpt.toml share/zeroth/examples/torchscript/CMakeLists.txt
        share/zeroth/template/CMakeLists.txt share/zeroth/template/gitignore share/zeroth/template/offload/c/plugin.c
        share/doc/zeroth/plugins/optimizers/lamb/README.md share/doc/zeroth/plugins/zero3/README.md
        lib/pkgconfig/zeroth.pc lib/pkgconfig/zeroth-sdk.pc)
  if(NOT EXISTS ${prefix}/${file})
    message(FATAL_ERROR "${file} is not installed")
  endif()
endforeach()
file(GLOB docs RELATIVE ${SOURCE} ${SOURCE}/docs/*)
foreach(file ${docs})
  if(NOT EXISTS ${prefix}/share/doc/zeroth/${file})
    message(FATAL_ERROR "${file} is not installed in share/doc/zeroth")
  endif()
endforeach()
# The installed completion asks the installed program.
file(WRITE ${SCRATCH}/complete.sh "source $1/share/bash-completion/completions/zeroth\n\
COMP_WORDS=($1/bin/zeroth trai)\nCOMP_CWORD=1\n_zeroth\necho \"completed: \${COMPREPLY[*]}\"\n")
must(bash ${SCRATCH}/complete.sh ${prefix})
must_say("completed: train\n")
file(GLOB_RECURSE files LIST_DIRECTORIES false ${prefix}/*)
foreach(file ${files})
  if(file MATCHES "/[.]")
    message(FATAL_ERROR "${file} is installed")
  endif()
  execute_process(COMMAND grep -qaF -e ${SOURCE} -e ${BUILD} -e ${TORCH} ${file} RESULT_VARIABLE names)
  if(names EQUAL 0)
    message(FATAL_ERROR "${file} names a folder of the build tree")
  endif()
  if(file MATCHES "[.]so[.0-9]*$|/bin/")
    execute_process(COMMAND readelf -SW ${file} OUTPUT_VARIABLE sections)
    if(NOT sections MATCHES "[.]dynsym" OR sections MATCHES "[.]debug_info|[.]symtab")
      message(FATAL_ERROR "${file} is not stripped, or has no dynamic symbols:\n${sections}")
    endif()
  endif()
endforeach()
file(REMOVE_RECURSE ${SCRATCH})
