# The control plane and the launcher, tested with real processes.
add_executable(launch_rank launch_rank.cpp)
target_link_libraries(launch_rank PRIVATE zr_comm)
target_include_directories(launch_rank PRIVATE ${CMAKE_SOURCE_DIR}/tests)
set_target_properties(launch_rank PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)

zr_test(launch_kill_test SOURCES launch_kill_test.cpp LIBRARIES GTest::gmock LABELS multirank)
add_dependencies(launch_kill_test zeroth launch_rank)
zr_test(launch_join_test SOURCES launch_join_test.cpp LIBRARIES zr_comm GTest::gmock LABELS multirank)
add_dependencies(launch_join_test zeroth launch_rank)
zr_test(launch_output_test SOURCES launch_output_test.cpp LIBRARIES GTest::gmock util LABELS multirank)
add_dependencies(launch_output_test zeroth launch_rank)
zr_test(launch_parts_test SOURCES launch_parts_test.cpp LIBRARIES zr_comm GTest::gmock LABELS multirank)
