# Defines zr::torch: libtorch_cpu and c10 as one target. Unlike the CMake package of the wheel, it does not need a
# CUDA toolkit. zr_find_torch() searches TORCH_ROOT (CMake or environment variable), then Torch_DIR
# (<root>/share/cmake/Torch), then the folder ZR_TORCH_DEFAULT_ROOT. If libtorch is not found, zr_find_torch() fails;
# zr_find_torch(WHY) instead sets WHY to the error message (or to "" if libtorch was found).
# ZR_TORCH_REQUIRED_VERSION is the required version; major.minor must be equal, because other versions of libtorch have
# another C++ ABI. ZR_TORCH_HINT is appended to error messages and says what to do. Sets ZR_TORCH_ROOT, ZR_TORCH_VERSION
# and ZR_TORCH_LIBRARY_DIRS. Targets that link zr::torch get these folders as RPATH, unless they have the property
# ZR_NO_TORCH_RPATH.
function(zr_find_torch)
  set(why "${ARGV0}")
  if(why)
    set(${why} "" PARENT_SCOPE)
  endif()
  if(TARGET zr::torch)
    return()
  endif()
  set(found "")
  set(problem "")
  set(given ${TORCH_ROOT} $ENV{TORCH_ROOT})
  foreach(dir ${Torch_DIR} $ENV{Torch_DIR})
    list(APPEND given ${dir}/../../..)
  endforeach()
  if(given)
    list(GET given 0 root)
  else()
    set(root "${ZR_TORCH_DEFAULT_ROOT}")
  endif()
  if(EXISTS ${root}/lib/libtorch_cpu.so AND EXISTS ${root}/include/torch/csrc/api/include/torch/torch.h)
    get_filename_component(found ${root} ABSOLUTE)
  elseif(given)
    set(problem "There is no libtorch in ${root} (TORCH_ROOT or Torch_DIR): lib/libtorch_cpu.so or the headers are \
missing. ${ZR_TORCH_HINT}")
  else()
    set(problem "libtorch was not found: TORCH_ROOT and Torch_DIR are not set, and there is no libtorch in \
${ZR_TORCH_DEFAULT_ROOT}. ${ZR_TORCH_HINT}")
  endif()
  set(version "")
  if(found)
    foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h torch/version.h)
      if(EXISTS ${found}/include/${header} AND NOT version)
        file(STRINGS ${found}/include/${header} lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
        string(REGEX REPLACE "[^;0-9]*([0-9]+)" "\\1" numbers "${lines}")
        list(JOIN numbers "." version)
      endif()
    endforeach()
    if(ZR_TORCH_REQUIRED_VERSION)
      string(REGEX MATCH "^[0-9]+\\.[0-9]+" wanted "${ZR_TORCH_REQUIRED_VERSION}")
      string(REGEX MATCH "^[0-9]+\\.[0-9]+" has "${version}")
      if(NOT wanted STREQUAL has)
        set(problem "libtorch in ${found} is version ${version}, but this Zeroth was built with \
${ZR_TORCH_REQUIRED_VERSION}, and libtorch ${wanted} is not binary compatible with other versions. ${ZR_TORCH_HINT}")
      endif()
    endif()
  endif()
  if(problem AND why)
    set(${why} "${problem}" PARENT_SCOPE)
    return()
  elseif(problem)
    message(FATAL_ERROR "${problem}")
  endif()
  add_library(zr_torch_lib INTERFACE)
  add_library(zr::torch ALIAS zr_torch_lib)
  target_include_directories(zr_torch_lib SYSTEM INTERFACE ${found}/include ${found}/include/torch/csrc/api/include)
  # In the CUDA wheels, libtorch_cpu needs the CUDA runtime and CUPTI to load; their folders are beside torch/.
  get_filename_component(beside ${found} REALPATH)
  file(GLOB extra LIST_DIRECTORIES true ${beside}/../nvidia/*/lib ${beside}/../nvidia/*/*/lib)
  set(dirs ${found}/lib ${extra})
  file(GLOB gomp ${found}/lib/libgomp*.so*)
  target_link_libraries(zr_torch_lib INTERFACE ${found}/lib/libtorch_cpu.so ${found}/lib/libc10.so ${gomp} pthread)
  # A program that does not call libtorch itself must load it too: libzeroth.so, which needs it, does not know where it
  # is.
  target_link_options(zr_torch_lib INTERFACE
    "LINKER:--push-state,--no-as-needed,${found}/lib/libtorch_cpu.so,${found}/lib/libc10.so,--pop-state")
  foreach(dir ${dirs})
    target_link_options(zr_torch_lib INTERFACE -Wl,-rpath-link,${dir}
      $<$<NOT:$<BOOL:$<TARGET_PROPERTY:ZR_NO_TORCH_RPATH>>>:-Wl,-rpath,${dir}>)
  endforeach()
  # Some builds of libtorch use the old ABI of std::string.
  execute_process(COMMAND nm -DC ${found}/lib/libc10.so OUTPUT_VARIABLE symbols ERROR_QUIET)
  if(NOT symbols MATCHES "std::__cxx11::basic_string")
    target_compile_definitions(zr_torch_lib INTERFACE _GLIBCXX_USE_CXX11_ABI=0)
  endif()
  set(ZR_TORCH_ROOT ${found} CACHE INTERNAL "")
  set(ZR_TORCH_LIBRARY_DIRS ${dirs} CACHE INTERNAL "")
  set(ZR_TORCH_VERSION "${version}" CACHE INTERNAL "")
  message(STATUS "libtorch ${version}: ${found}")
endfunction()
