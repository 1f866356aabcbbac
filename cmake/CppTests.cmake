# The law suite (every monoid obeys its laws, and the suite notices planted mutations) and tests of the CPU engine's parts.
find_package(Threads REQUIRED)
enable_testing()
foreach(test test_laws test_mutations test_thread_pool)
  add_executable(${test} tests/cpp/${test}.cpp)
  target_link_libraries(${test} PRIVATE monoidreduce_flags Threads::Threads)
  add_test(NAME ${test} COMMAND ${test})
endforeach()
