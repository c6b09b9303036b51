# find_package(ZerothSdk 0.9): the target zr::sdk and zr_add_plugin(), for plug-ins. Does not need libtorch. The version
# is that of the plug-in ABI.
include(${CMAKE_CURRENT_LIST_DIR}/ZerothSdkTargets.cmake)
if(NOT TARGET zr::sdk)
  add_library(zr::sdk ALIAS Zeroth::sdk)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/ZrPlugin.cmake)
