# zr_add_plugin(<target> ROLE strategy|communicator|optimizer|offload ID <id> SOURCES <file>...
#               [KERNELS <file>...] [KERNELS_OF <target>...] [LIBRARIES <lib>...])
#
# Builds a plug-in library zr_<role>_<id>.so in ZR_PLUGIN_OUTPUT (default <build>/plugins). It exports only zr_module_v1
# and its data tags. Only its owner can write to it, because the host rejects plug-ins that other users can change (with
# umask 002 the group could). Fused multiply-add is disabled, because updates must be bit-identical on every machine.
# SOURCES are C, C++ or CUDA files, of languages that project() enables. KERNELS are C or C++ files that are compiled
# once per instruction set of the CPU, with ZR_ISA defined as portable, avx2 or avx512: see zr/isa.hpp. KERNELS_OF are
# plug-ins of the same project whose compiled KERNELS this one has too.
set(ZR_PLUGIN_CMAKE_DIR ${CMAKE_CURRENT_LIST_DIR} CACHE INTERNAL "The folder of ZrPlugin.cmake and zr.map")

function(zr_plugin_compile_settings target)
  target_link_libraries(${target} PRIVATE zr::sdk)
  target_compile_features(${target} PRIVATE cxx_std_17)
  if(CMAKE_CUDA_COMPILER)
    target_compile_features(${target} PRIVATE cuda_std_17)
  endif()
  set_target_properties(${target} PROPERTIES
    C_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  set(exact -ffp-contract=off -fno-math-errno)
  list(JOIN exact "," exact_for_host)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:C,CXX>:${exact}>"
    "$<$<COMPILE_LANG_AND_ID:CUDA,Clang>:${exact}>"
    "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-fmad=false;-Xcompiler=${exact_for_host}>"
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-gnu-unique>)
endfunction()

# Fails if a source of zr_add_plugin(target ...) would be left out, because its language is not enabled.
function(zr_check_plugin_languages target)
  get_property(enabled GLOBAL PROPERTY ENABLED_LANGUAGES)
  foreach(file ${ARGN})
    set(language "")
    if(file MATCHES "[.]c$")
      set(language C)
    elseif(file MATCHES "[.](cpp|cc|cxx|c[+][+]|C)$")
      set(language CXX)
    elseif(file MATCHES "[.]cu$")
      set(language CUDA)
    endif()
    if(language AND NOT language IN_LIST enabled)
      message(FATAL_ERROR "zr_add_plugin(${target}): ${file} is a ${language} file, but the project does not enable \
this language: add ${language} to project(... LANGUAGES ...)")
    endif()
  endforeach()
endfunction()

function(zr_add_plugin target)
  cmake_parse_arguments(PLUGIN "" "ROLE;ID" "SOURCES;KERNELS;KERNELS_OF;LIBRARIES" ${ARGN})
  if(NOT PLUGIN_ROLE MATCHES "^(strategy|communicator|optimizer|offload)$")
    message(FATAL_ERROR "zr_add_plugin(${target}): ROLE is \"${PLUGIN_ROLE}\", must be strategy, communicator, \
optimizer or offload")
  endif()
  if(NOT PLUGIN_ID MATCHES "^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)?$")
    message(FATAL_ERROR "zr_add_plugin(${target}): ID is \"${PLUGIN_ID}\", must be lower-case letters, digits and \
underscores, begin with a letter, and may have the form vendor.name")
  endif()
  if(NOT PLUGIN_SOURCES OR PLUGIN_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "zr_add_plugin(${target}): SOURCES is missing, or there are unknown arguments: \
\"${PLUGIN_UNPARSED_ARGUMENTS}\"")
  endif()
  zr_check_plugin_languages(${target} ${PLUGIN_SOURCES} ${PLUGIN_KERNELS})
  if(PLUGIN_KERNELS MATCHES "[.]cu(;|$)")
    message(FATAL_ERROR "zr_add_plugin(${target}): KERNELS \"${PLUGIN_KERNELS}\" has a CUDA file, but KERNELS are \
compiled once per instruction set of the CPU: list it in SOURCES, and set CUDA_ARCHITECTURES for its GPUs")
  endif()
  if(NOT ZR_PLUGIN_OUTPUT)
    set(ZR_PLUGIN_OUTPUT ${CMAKE_BINARY_DIR}/plugins)
  endif()

  add_library(${target} MODULE ${PLUGIN_SOURCES})
  set_property(GLOBAL APPEND PROPERTY ZR_PLUGINS ${target})
  zr_plugin_compile_settings(${target})
  target_link_libraries(${target} PRIVATE ${PLUGIN_LIBRARIES})
  set(map ${ZR_PLUGIN_CMAKE_DIR}/zr.map)
  set_target_properties(${target} PROPERTIES PREFIX "" SUFFIX ".so" OUTPUT_NAME zr_${PLUGIN_ROLE}_${PLUGIN_ID}
    LIBRARY_OUTPUT_DIRECTORY ${ZR_PLUGIN_OUTPUT} LINK_DEPENDS ${map})
  target_link_options(${target} PRIVATE -Wl,--version-script=${map} -Wl,--exclude-libs,ALL -Wl,-z,now)
  if(NOT ZR_SANITIZE)  # the symbols of a sanitizer are defined by the program
    target_link_options(${target} PRIVATE -Wl,-z,defs)
  endif()
  add_custom_command(TARGET ${target} POST_BUILD VERBATIM
    COMMAND chmod go-w $<TARGET_FILE:${target}> $<TARGET_FILE_DIR:${target}>)

  if(PLUGIN_KERNELS)
    set(flags_portable "")
    set(flags_avx2 -mavx2)
    set(flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
    set(sets portable)
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
      list(APPEND sets avx2 avx512)
    endif()
    foreach(isa ${sets})
      add_library(${target}_${isa} OBJECT ${PLUGIN_KERNELS})
      zr_plugin_compile_settings(${target}_${isa})
      target_compile_definitions(${target}_${isa} PRIVATE ZR_ISA=${isa})
      target_compile_options(${target}_${isa} PRIVATE ${flags_${isa}} $<$<NOT:$<CONFIG:Debug>>:-O3>)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${isa}>)
    endforeach()
  endif()
  foreach(other ${PLUGIN_KERNELS_OF})
    if(NOT TARGET ${other}_portable)
      message(FATAL_ERROR "zr_add_plugin(${target}): KERNELS_OF names \"${other}\", but no plug-in of this name with \
KERNELS was added: call zr_add_plugin(${other} ... KERNELS ...) before")
    endif()
    foreach(isa portable avx2 avx512)
      if(TARGET ${other}_${isa})
        target_sources(${target} PRIVATE $<TARGET_OBJECTS:${other}_${isa}>)
      endif()
    endforeach()
  endforeach()
endfunction()
