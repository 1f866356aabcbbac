# The law suite (every monoid obeys its laws, and the suite notices planted mutations), and tests of the engines' parts.
find_package(Threads REQUIRED)
enable_testing()
foreach(test test_laws test_mutations test_monoids test_activation test_score test_thread_pool)
  add_executable(${test} tests/cpp/${test}.cpp)
  target_link_libraries(${test} PRIVATE monoidreduce_flags Threads::Threads)
  add_test(NAME ${test} COMMAND ${test})
endforeach()

if(MONOIDREDUCE_WITH_CUDA)
  add_executable(test_simt tests/cpp/test_simt_operators.cu tests/cpp/test_simt_monoids.cu csrc/path_counter.cpp
                           $<TARGET_OBJECTS:cuda_kernels>)
  target_link_libraries(test_simt PRIVATE monoidreduce_flags)
  add_test(NAME test_simt COMMAND test_simt)
  set_tests_properties(test_simt PROPERTIES SKIP_REGULAR_EXPRESSION "no CUDA-capable device|driver version is insufficient")
endif()
