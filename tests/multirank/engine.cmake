# Tests of zr::Engine through its public API; they need libtorch.
if(ZR_TORCH)
  zr_find_torch()
  set(ZR_PLUGIN_OUTPUT ${PROJECT_BINARY_DIR}/tests/plugins)
  zr_add_plugin(zr_test_dealt ROLE strategy ID dealt SOURCES plugins/dealt.cpp)
  zr_add_plugin(zr_test_cramped ROLE strategy ID cramped SOURCES plugins/cramped.cpp)
  zr_add_plugin(zr_test_halves ROLE strategy ID halves SOURCES plugins/halves.cpp)
  zr_add_plugin(zr_test_blocks ROLE optimizer ID blocks SOURCES plugins/blocks.cpp)
  unset(ZR_PLUGIN_OUTPUT)
  foreach(program engine_case boundary_case buffers_case engine_use_case checkpoint_case model_case offload_case
          operators_trainer sharded_case user_errors_case)
    add_executable(${program})
    target_include_directories(${program} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
    target_link_libraries(${program} PRIVATE Zeroth::zeroth)
    set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    add_dependencies(${program} zeroth zr_test_dealt zr_test_cramped zr_test_halves zr_test_blocks
                     zr_offload_cpu zr_offload_nvme)
    zr_share_headers(zr_torch_headers ${program})
  endforeach()
  target_sources(engine_case PRIVATE engine_case.cpp)
  target_sources(boundary_case PRIVATE boundary_case.cpp)
  target_sources(engine_use_case PRIVATE engine_use_case.cpp)
  target_sources(model_case PRIVATE alias_case.cpp model_case.cpp tiers_case.cpp pointer_case.cpp
                                    refresh_case.cpp)
  target_sources(buffers_case PRIVATE buffers_case.cpp)
  target_sources(checkpoint_case PRIVATE checkpoint_case.cpp)
  target_link_libraries(checkpoint_case PRIVATE ${CMAKE_DL_LIBS})
  target_sources(offload_case PRIVATE offload_case.cpp)
  add_library(zr_test_file_calls SHARED plugins/file_calls.cpp)
  set_target_properties(zr_test_file_calls PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_sources(user_errors_case PRIVATE user_errors_case.cpp)
  target_sources(sharded_case PRIVATE sharded_case.cpp sharded_memory_case.cpp)
  target_sources(operators_trainer PRIVATE operators/autograds.cpp operators/layers.cpp operators/tensors.cpp
                                           operators/trainer.cpp)
  zr_test(engine_test SOURCES engine_test.cpp engine_formulas_test.cpp engine_loss_test.cpp
          LIBRARIES nlohmann_json::nlohmann_json GTest::gmock
          LABELS multirank TIMEOUT 300)
  zr_test(boundary_test SOURCES boundary_test.cpp LIBRARIES nlohmann_json::nlohmann_json LABELS multirank TIMEOUT 300)
  zr_test(engine_use_test SOURCES run_folder_test.cpp weight_digest_test.cpp
          LIBRARIES nlohmann_json::nlohmann_json GTest::gmock
          LABELS multirank TIMEOUT 300)
  add_dependencies(engine_use_test engine_case engine_use_case)
  zr_test(checkpoint_test SOURCES checkpoint_test.cpp checkpoint_use_test.cpp
          LIBRARIES zr_checkpoint nlohmann_json::nlohmann_json LABELS multirank TIMEOUT 600)
  zr_test(model_test SOURCES model_test.cpp LIBRARIES nlohmann_json::nlohmann_json LABELS multirank TIMEOUT 600)
  zr_test(resume_test SOURCES resume_test.cpp LIBRARIES zr_checkpoint nlohmann_json::nlohmann_json
          LABELS multirank TIMEOUT 300)
  add_dependencies(resume_test engine_case)
  zr_test(buffers_test SOURCES buffers_test.cpp buffers_message_test.cpp
          LIBRARIES zr_checkpoint nlohmann_json::nlohmann_json LABELS multirank TIMEOUT 300)
  add_dependencies(buffers_test buffers_case)
  zr_test(checkpoint_scale_test SOURCES checkpoint_scale_test.cpp
          LIBRARIES zr_checkpoint nlohmann_json::nlohmann_json LABELS multirank slow TIMEOUT 300)
  add_dependencies(checkpoint_scale_test buffers_case)
  zr_test(offload_test SOURCES offload_auto_test.cpp offload_fault_test.cpp offload_test.cpp
          LIBRARIES zr_checkpoint nlohmann_json::nlohmann_json GTest::gmock LABELS multirank TIMEOUT 300)
  add_dependencies(offload_test engine_case offload_case zr_offload_cpu zr_offload_nvme zr_offload_nvme_failing)
  zr_test(sharded_test SOURCES sharded_test.cpp LIBRARIES nlohmann_json::nlohmann_json GTest::gmock
          LABELS multirank TIMEOUT 300)
  zr_test(user_errors_test SOURCES user_errors_test.cpp LIBRARIES nlohmann_json::nlohmann_json GTest::gmock
          LABELS multirank TIMEOUT 300)
  add_dependencies(user_errors_test user_errors_case)
  if(ZR_EXAMPLES)
    zr_test(memory_test SOURCES memory_test.cpp LIBRARIES nlohmann_json::nlohmann_json LABELS multirank TIMEOUT 300)
    get_property(plugins GLOBAL PROPERTY ZR_PLUGINS)
    list(FILTER plugins EXCLUDE REGEX "^(bad_plugin|zr_test|job)_")  # keeps the plug-ins of plugins/
    add_dependencies(memory_test zeroth gpt engine_case ${plugins})
    zr_test(train_display_test SOURCES train_display_test.cpp
            LIBRARIES nlohmann_json::nlohmann_json GTest::gmock util LABELS multirank)
    add_dependencies(train_display_test zeroth quickstart ${plugins})
    zr_test(checkpoint_crash_test SOURCES checkpoint_crash_test.cpp
            LIBRARIES zr_checkpoint nlohmann_json::nlohmann_json LABELS multirank TIMEOUT 600)
    add_dependencies(checkpoint_crash_test zeroth gpt checkpoint_case zr_test_file_calls ${plugins})
  endif()
endif()
