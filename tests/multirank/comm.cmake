# Communicator tests: the plug-ins through their C table, and CommRuntime, which wraps them.
zr_add_plugin(zr_test_poor ROLE communicator ID poor SOURCES plugins/poor.cpp)
zr_add_plugin(zr_test_faulty ROLE communicator ID faulty SOURCES plugins/faulty.cpp)
set_target_properties(zr_test_poor zr_test_faulty PROPERTIES
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/plugins)
foreach(name comm_shm_test comm_shm_flight_test comm_shm_life_test comm_runtime_test comm_runtime_failure_test)
  zr_test(${name} SOURCES ${name}.cpp LIBRARIES zr_comm GTest::gmock LABELS multirank)
  add_dependencies(${name} zr_comm_shm zr_test_poor)
endforeach()
zr_test(norm_blocks_test SOURCES norm_blocks_test.cpp LIBRARIES zr_engine GTest::gmock LABELS multirank)
add_dependencies(norm_blocks_test zr_comm_shm)
