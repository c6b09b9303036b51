# Rules for the Python package (`make wheel`, core/python/pyproject.toml): the component `python`, whose prefix is the
# folder zeroth/ of the wheel. It is as an installed prefix, without what only C++ programs use (ZrInstall.cmake):
#   bin/zeroth  bin/zeroth-conform  lib/libzeroth.so.0  lib/libzeroth_python.so  lib/zeroth/plugins/*.so
# libtorch is in the package torch, beside zeroth/. The library for muon, and the one it needs, are with the plug-ins.
set(torch ../../torch/lib)  # from zeroth/lib
set(plugin_folder lib/zeroth/plugins)
foreach(target zeroth_lib zeroth_python)
  if(TARGET ${target})
    set_property(TARGET ${target} PROPERTY VERSION)  # a wheel has no symbolic links: libzeroth.so.0 is the file
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/${torch}" ZR_NO_TORCH_RPATH ON)
    install(TARGETS ${target} LIBRARY DESTINATION lib COMPONENT python NAMELINK_SKIP)
  endif()
endforeach()
install(TARGETS zeroth zeroth-conform RUNTIME DESTINATION bin COMPONENT python)

get_property(plugins GLOBAL PROPERTY ZR_PLUGINS)
foreach(plugin ${plugins})
  get_target_property(device ${plugin} ZR_DEVICE)
  if(NOT device)
    set(device "")
  endif()
  install(TARGETS ${plugin} LIBRARY DESTINATION ${plugin_folder}/${device} COMPONENT python)
endforeach()
get_property(plugin_files GLOBAL PROPERTY ZR_PLUGIN_FILES)
install(FILES ${plugin_files} DESTINATION ${plugin_folder} COMPONENT python)

# The licences: of Zeroth, and of what is compiled in or travels along.
install(FILES LICENSE DESTINATION ${SKBUILD_METADATA_DIR}/licenses COMPONENT python)
foreach(package libdnnl-dev ocl-icd-libopencl1 libfmt-dev libtomlplusplus-dev libxxhash-dev liburing-dev
                nlohmann-json3-dev)
  install(FILES /usr/share/doc/${package}/copyright DESTINATION ${SKBUILD_METADATA_DIR}/licenses COMPONENT python
          RENAME ${package} OPTIONAL)
endforeach()
