# Configures a project that embeds Zeroth by FetchContent; with -DFULL=ON builds it and trains on one rank.
# cmake -DSOURCE=... -DSCRATCH=... -DTORCH=... -DLAUNCHER=... [-DFULL=ON] -P embed.cmake
function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nfailed with exit code ${code}:\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${SCRATCH})
must(${CMAKE_COMMAND} -G Ninja -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DZEROTH_SOURCE=${SOURCE} -DTORCH_ROOT=${TORCH}
     -S ${SOURCE}/tests/package/embed -B ${SCRATCH})
if(NOT FULL)
  must(${CMAKE_COMMAND} --build ${SCRATCH} --target zr_base zr_zero0)
else()
  must(${CMAKE_COMMAND} --build ${SCRATCH})
  file(WRITE ${SCRATCH}/job.toml "strategy = \"zero0\"\noptimizer = \"adamw\"\n[train]\nsteps = 3\n")
  file(GLOB_RECURSE plugin ${SCRATCH}/*/zr_strategy_zero0.so)
  cmake_path(GET plugin PARENT_PATH plugins)
  must(${CMAKE_COMMAND} -E env ZR_PLUGIN_PATH=${plugins} ${SCRATCH}/app ${SCRATCH}/job.toml
       "job.runs=\"${SCRATCH}/runs\"")
  if(NOT EXISTS ${SCRATCH}/runs/job/summary.json)
    message(FATAL_ERROR "the program that embeds Zeroth wrote no summary")
  endif()
endif()
file(REMOVE_RECURSE ${SCRATCH})
