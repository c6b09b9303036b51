# Compiler and linker settings of this repository. Authors of plug-ins need only ZrPlugin.cmake.
include(${CMAKE_CURRENT_LIST_DIR}/ZrPlugin.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/ZrTorch.cmake)
set(ZR_TORCH_DEFAULT_ROOT ${PROJECT_SOURCE_DIR}/build/deps/torch/torch)  # `make setup` unpacks libtorch there
set(ZR_TORCH_HINT "Run `make setup` (it unpacks the torch 2.11.0 wheel below build/deps), or set TORCH_ROOT to the \
folder of a libtorch that contains lib/ and include/.")

find_program(ZR_CCACHE ccache)
if(ZR_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without this, ccache does not cache files that use a precompiled header (see -fpch-preprocess in core/model).
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${ZR_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
endif()
find_program(ZR_MOLD NAMES mold ld.lld)
if(ZR_MOLD MATCHES "mold$")
  add_link_options(-fuse-ld=mold)
elseif(ZR_MOLD)
  add_link_options(-fuse-ld=lld)
endif()

add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:C,CXX>:-fno-math-errno>)  # no fused multiply-add: results must be bit-identical
if(ZR_DEVELOPER)
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Werror>")
endif()
set(ZR_SANITIZE "" CACHE STRING "Sanitizers: address,undefined or thread")
if(ZR_SANITIZE)
  add_compile_options(-fsanitize=${ZR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)  # false warning of gcc 12 about std::regex with sanitizers
  add_link_options(-fsanitize=${ZR_SANITIZE})
  if(ZR_SANITIZE MATCHES "thread")
    add_compile_options(-Wno-tsan)  # ThreadSanitizer does not support the fences of Asio; it supports its locks
  endif()
endif()

if(ZR_WHEEL)
  set(Boost_USE_STATIC_LIBS ON)
endif()
find_package(Boost 1.74 REQUIRED COMPONENTS filesystem program_options)
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(fmt 9 REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(tomlplusplus REQUIRED IMPORTED_TARGET tomlplusplus)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(liburing REQUIRED IMPORTED_TARGET liburing)
find_library(ZR_LIBURING NAMES liburing.a uring HINTS ${liburing_LIBRARY_DIRS})  # prefers the static library
# For the Python package, {fmt}, toml++ and xxHash are header-only. {fmt} adds 2 s to each compilation.
set(ZR_FMT fmt::fmt)
if(ZR_WHEEL)
  set(ZR_FMT fmt::fmt-header-only)
  set_target_properties(PkgConfig::tomlplusplus PROPERTIES INTERFACE_COMPILE_OPTIONS "" INTERFACE_LINK_LIBRARIES "")
  set_target_properties(PkgConfig::xxhash PROPERTIES INTERFACE_COMPILE_DEFINITIONS XXH_INLINE_ALL
    INTERFACE_LINK_LIBRARIES "")
endif()

# zr_unity(target files): compiles that many sources of the target together (0: all), because the headers take most of
# the time of each compilation; those of libtorch take 6 to 10 s, even precompiled. Two sources of a target cannot
# define the same name in an anonymous namespace.
option(ZR_UNITY "Compile several sources together, which halves the time of a full build" ON)
function(zr_unity target files)
  if(ZR_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${files})
  endif()
endfunction()

# Defines zr_<name>_root, the include root of a subsystem of core/: a folder in the build tree that has only a link to
# the sources of the subsystem. A file can include the headers of its own subsystem, as "name/file.hpp", and of the
# subsystems that it depends on, but no others: the compiler enforces the order of dependencies.
function(zr_include_root name)
  set(root ${PROJECT_BINARY_DIR}/include/${name})
  file(MAKE_DIRECTORY ${root})
  file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${root}/${name} SYMBOLIC)
  add_library(zr_${name}_root INTERFACE)
  target_include_directories(zr_${name}_root INTERFACE ${root})
endfunction()

# -O1 compiles in two thirds of the time of -O2. Releases are compiled with -O3.
function(zr_optimize_less target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:RelWithDebInfo>:-O1>)
endfunction()

# Defines a subsystem of core/: the static library zr_<name>, which can include only the subsystems after DEPENDS and
# what these depend on. OWN_HEADERS: it precompiles other headers. BEFORE_TRAINING: no inner loop of a step is in it.
function(zr_subsystem name)
  cmake_parse_arguments(SUBSYSTEM "OWN_HEADERS;BEFORE_TRAINING" "" "SOURCES;DEPENDS;LIBRARIES" ${ARGN})
  add_library(zr_${name} STATIC ${SUBSYSTEM_SOURCES})
  if(SUBSYSTEM_BEFORE_TRAINING)
    zr_optimize_less(zr_${name})
    zr_share_headers(zr_core_headers_O1 zr_${name})
  elseif(NOT SUBSYSTEM_OWN_HEADERS)
    zr_share_headers(zr_core_headers zr_${name})
  endif()
  if(NOT name STREQUAL base)  # tests replace some of its sources
    zr_unity(zr_${name} 5)
  endif()
  zr_include_root(${name})
  target_link_libraries(zr_${name} PUBLIC zr::sdk zr_${name}_root ${SUBSYSTEM_LIBRARIES})
  foreach(subsystem ${SUBSYSTEM_DEPENDS})
    target_link_libraries(zr_${name} PUBLIC zr_${subsystem})
  endforeach()
endfunction()

# zr_precompile(owner header...): defines the library `owner`, which has only a precompiled header.
function(zr_precompile owner)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${owner}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "")
  add_library(${owner} STATIC ${source})
  target_precompile_headers(${owner} PRIVATE ${ARGN})
endfunction()

# zr_share_headers(owner target...): makes the targets use the precompiled header of `owner`. The compiler accepts it
# only with the same flags, so programs are compiled with -fPIC too.
function(zr_share_headers owner)
  foreach(target ${ARGN})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "EXECUTABLE")
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
      target_compile_options(${target} PRIVATE -fPIC)
    endif()
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endforeach()
endfunction()

# Defines a test program: zr_test(name [TORCH] [LOOPS] [FIRST] SOURCES ... LIBRARIES ... [LABELS ...]
# [TIMEOUT seconds]). Each test becomes a ctest test of the same name. TORCH: the program includes libtorch's headers.
# LOOPS: it spends its time in loops of its own, and is optimized. FIRST: CTest begins with its tests, because one takes
# a minute. A test whose full name contains SLOW_ runs with `make test-all` only, and may take three times as long.
function(zr_test name)
  cmake_parse_arguments(TEST "TORCH;LOOPS;FIRST" "TIMEOUT" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 120)
  endif()
  if(ZR_SANITIZE)
    math(EXPR TEST_TIMEOUT "3 * ${TEST_TIMEOUT}")
  endif()
  if(NOT TEST_LABELS)  # the folder of tests/: unit, contract, arch
    file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR}/tests ${CMAKE_CURRENT_SOURCE_DIR})
    string(REGEX REPLACE "/.*" "" TEST_LABELS ${folder})
  endif()
  add_executable(${name} $<TARGET_OBJECTS:zr_test_standard_library> ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE ${TEST_LIBRARIES} GTest::gtest_main)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE ZR_SOURCE_DIR="${PROJECT_SOURCE_DIR}" ZR_BUILD_DIR="${PROJECT_BINARY_DIR}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(TEST_TORCH)
    zr_share_headers(zr_torch_test_headers ${name})
  elseif(TEST_LOOPS)
    zr_optimize_less(${name})
  else()
    zr_share_headers(zr_test_headers ${name})
  endif()
  if(NOT TEST_LOOPS)
    target_link_libraries(${name} PRIVATE zr_test_settings)
  endif()
  list(LENGTH TEST_SOURCES sources)
  if(TEST_TORCH)
    zr_unity(${name} 14)
  elseif(sources GREATER 2)
    zr_unity(${name} 7)
  endif()
  list(JOIN TEST_LABELS "-" labels)  # gtest_discover_tests() does not accept lists as values of properties
  math(EXPR slow_timeout "3 * ${TEST_TIMEOUT}")
  # Not the machine profile of this host.
  set(properties ENVIRONMENT "ZR_MACHINE_PROFILE=${PROJECT_BINARY_DIR}/tests/no-machine.json")
  if(TEST_FIRST)
    list(APPEND properties COST 1000)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 TEST_FILTER -*SLOW_*
    PROPERTIES ${properties} TIMEOUT ${TEST_TIMEOUT} LABELS "${labels}")
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 TEST_FILTER *SLOW_* TEST_LIST ${name}_slow
    PROPERTIES ${properties} TIMEOUT ${slow_timeout} LABELS "${labels}-slow")
endfunction()

# Defines a program of multi-rank tests (tests/support/multirank.hpp). The program is also the program of the ranks. The
# arguments are those of zr_test(). With ZR_TEST_HOSTS=2 in the environment its jobs run over MPI (make test-hosts).
function(zr_multirank_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 300)
  endif()
  # libzeroth is first, so that no subsystem in it is linked a second time.
  zr_test(${name} TORCH SOURCES ${TEST_SOURCES}
          LIBRARIES Zeroth::zeroth zr_multirank ${TEST_LIBRARIES}
          LABELS multirank jobs ${TEST_LABELS} TIMEOUT ${TEST_TIMEOUT})
  target_link_options(${name} PRIVATE -Wl,--wrap=execve)  # tests/support/job_command.cpp
  add_dependencies(${name} zr_test_round_robin zr_test_cramped zr_test_halves zr_test_blocks zr_test_twins)
endfunction()
