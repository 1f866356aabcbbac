# The law suite: every monoid obeys its laws, and the suite notices planted mutations.
enable_testing()
foreach(test test_laws test_mutations)
  add_executable(${test} tests/cpp/${test}.cpp)
  target_link_libraries(${test} PRIVATE monoidreduce_flags)
  add_test(NAME ${test} COMMAND ${test})
endforeach()
