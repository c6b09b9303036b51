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
