# find_package(monoidreduce) defines the target monoidreduce::headers. This file is in share/cmake/monoidreduce/ of an installed
# package, and in cmake/package/ of the source tree, to which an editable install points.
if(NOT TARGET monoidreduce::headers)
  add_library(monoidreduce::headers INTERFACE IMPORTED)
  target_compile_features(monoidreduce::headers INTERFACE cxx_std_20)
  target_link_libraries(monoidreduce::headers INTERFACE ${CMAKE_DL_LIBS}) # dlsym, in cpu/thread_pool.h
  if(EXISTS "${CMAKE_CURRENT_LIST_DIR}/../../../include/monoidreduce")
    get_filename_component(monoidreduce_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../../../include" ABSOLUTE)
  else()
    get_filename_component(monoidreduce_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../../csrc/include" ABSOLUTE)
  endif()
  target_include_directories(monoidreduce::headers INTERFACE "${monoidreduce_INCLUDE_DIR}")
endif()
