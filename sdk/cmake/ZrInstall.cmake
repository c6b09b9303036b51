# Rules for cmake --install: two components, `sdk` (for authors of plug-ins, without libtorch) and `engine` (the rest):
#   bin/zeroth  bin/zeroth-conform (component sdk)  lib/libzeroth.so  lib/zeroth/plugins/*.so  include/zr
#   lib/cmake/Zeroth  lib/cmake/ZerothSdk (component sdk, its version is that of the plug-in ABI)  lib/pkgconfig
#   share/doc/zeroth (licence, README, documentation, changelogs)  share/zeroth/examples  share/zeroth/abi
#   share/zeroth/template (the projects of `zeroth new`)
#   share/bash-completion/completions/zeroth
# The installed prefix can be moved. No installed file contains the path of the build tree.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/Zeroth)
set(sdk_package ${CMAKE_INSTALL_LIBDIR}/cmake/ZerothSdk)
set(pkgconfig ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
set(docs ${CMAKE_INSTALL_DATADIR}/doc/zeroth)
set(built "")  # the targets that are installed

option(ZR_INSTALL_STRIP "Strip installed binaries; debug information is ten times the size of the code" ON)
foreach(component sdk engine)
  install(CODE "set(CMAKE_INSTALL_DO_STRIP ${ZR_INSTALL_STRIP})" COMPONENT ${component})
endforeach()
# Zeroth does not trust plug-ins in folders that the group can write to (umask 002).
set(CMAKE_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
    WORLD_READ WORLD_EXECUTE)

# The SDK.
install(TARGETS zr_sdk EXPORT ZerothSdkTargets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT ZerothSdkTargets NAMESPACE Zeroth:: DESTINATION ${sdk_package} COMPONENT sdk)
install(DIRECTORY sdk/include/zr DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT sdk PATTERN ".*" EXCLUDE)
file(STRINGS sdk/include/zr/abi/base.h abi REGEX "define ZR_ABI_M(AJOR|INOR) ")
string(REGEX REPLACE "[^0-9]*([0-9]+)u;[^0-9]*([0-9]+)u" "\\1.\\2" ZR_ABI_VERSION "${abi}")
configure_file(sdk/cmake/ZerothSdkConfigVersion.cmake.in ${PROJECT_BINARY_DIR}/ZerothSdkConfigVersion.cmake @ONLY)
install(FILES sdk/cmake/ZerothSdkConfig.cmake ${PROJECT_BINARY_DIR}/ZerothSdkConfigVersion.cmake
        sdk/cmake/ZrPlugin.cmake sdk/cmake/zr.map DESTINATION ${sdk_package} COMPONENT sdk)
install(DIRECTORY sdk/abi DESTINATION ${CMAKE_INSTALL_DATADIR}/zeroth COMPONENT sdk PATTERN ".*" EXCLUDE)
install(DIRECTORY sdk/template DESTINATION ${CMAKE_INSTALL_DATADIR}/zeroth COMPONENT sdk PATTERN ".*" EXCLUDE)
install(DIRECTORY examples/plugins DESTINATION ${CMAKE_INSTALL_DATADIR}/zeroth/examples COMPONENT sdk
        PATTERN "build*" EXCLUDE)
install(FILES LICENSE DESTINATION ${docs} COMPONENT sdk)
if(TARGET zeroth-conform)
  list(APPEND built zeroth-conform)
  install(TARGETS zeroth-conform RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT sdk)
endif()
install(FILES sdk/README.md sdk/CHANGELOG.md DESTINATION ${docs}/sdk COMPONENT sdk)

# The engine.
if(TARGET zeroth_lib)
  # libzeroth.so finds libtorch in lib/libtorch (an unpacked archive, the torch folder of the wheel, or a link to one).
  set_target_properties(zeroth_lib PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/libtorch/lib")
  list(APPEND built zeroth_lib)
  install(TARGETS zeroth_lib EXPORT ZerothEngineTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT engine INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ZerothEngineTargets NAMESPACE Zeroth:: DESTINATION ${package} COMPONENT engine)
  install(DIRECTORY core/api/include/zr core/base/include/zr DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    COMPONENT engine PATTERN ".*" EXCLUDE)
  install(FILES sdk/cmake/ZrTorch.cmake DESTINATION ${package} COMPONENT engine)
  install(DIRECTORY examples/gpt examples/quickstart examples/torchscript
    DESTINATION ${CMAKE_INSTALL_DATADIR}/zeroth/examples COMPONENT engine
    PATTERN "runs" EXCLUDE PATTERN "build*" EXCLUDE)
endif()
if(TARGET zeroth)
  set_target_properties(zeroth PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  list(APPEND built zeroth)
  install(TARGETS zeroth RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT engine)
  install(FILES core/cli/completion.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
    COMPONENT engine RENAME zeroth)
endif()
get_property(plugin_files GLOBAL PROPERTY ZR_PLUGIN_FILES)  # libraries that plug-ins bring along
install(FILES ${plugin_files} DESTINATION ${CMAKE_INSTALL_LIBDIR}/zeroth/plugins COMPONENT engine)
get_property(plugins GLOBAL PROPERTY ZR_PLUGINS)
foreach(plugin ${plugins})  # the plug-ins in plugins/, not those of the tests
  get_target_property(folder ${plugin} SOURCE_DIR)
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${folder})
  if(folder MATCHES "^plugins/")
    get_target_property(device ${plugin} ZR_DEVICE)  # the type of a device
    if(NOT device)
      set(device "")
    endif()
    list(APPEND built ${plugin})
    install(TARGETS ${plugin} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/zeroth/plugins/${device} COMPONENT engine)
  endif()
endforeach()
install(FILES README.md SECURITY.md CHANGELOG.md CONTRIBUTING.md DESTINATION ${docs} COMPONENT engine)
install(DIRECTORY docs DESTINATION ${docs} COMPONENT engine PATTERN ".*" EXCLUDE)
install(DIRECTORY plugins DESTINATION ${docs} COMPONENT engine FILES_MATCHING PATTERN README.md)  # how they work

# `make train` leaves a tree that can be installed, in full and by component.
if(TARGET zr_training)
  add_dependencies(zr_training ${built})
endif()

# find_package(Zeroth) and pkg-config.
set(config ${PROJECT_BINARY_DIR}/ZerothConfig.cmake)
set(version ${PROJECT_BINARY_DIR}/ZerothConfigVersion.cmake)
configure_package_config_file(sdk/cmake/ZerothConfig.cmake.in ${config} INSTALL_DESTINATION ${package})
write_basic_package_version_file(${version} COMPATIBILITY SameMinorVersion)
foreach(component sdk engine)  # each works without the other; with both, it is the same file
  install(FILES ${config} ${version} DESTINATION ${package} COMPONENT ${component})
endforeach()
file(RELATIVE_PATH zr_pc_prefix /${pkgconfig} /)  # relative, so that pkg-config files work after the prefix was moved
string(REGEX REPLACE "/$" "" zr_pc_prefix "${zr_pc_prefix}")
configure_file(sdk/cmake/zeroth-sdk.pc.in ${PROJECT_BINARY_DIR}/zeroth-sdk.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/zeroth-sdk.pc DESTINATION ${pkgconfig} COMPONENT sdk)
if(TARGET zeroth_lib)
  configure_file(sdk/cmake/zeroth.pc.in ${PROJECT_BINARY_DIR}/zeroth.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/zeroth.pc DESTINATION ${pkgconfig} COMPONENT engine)
endif()
