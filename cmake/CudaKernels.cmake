# The CUDA kernels: objects for the Python module and for their C++ test.
include(cmake/CudaToolchain.cmake)

if(MONOIDREDUCE_WITH_CUDA)
  # The standard as a flag: CMake 3.25, which Debian 12 has, does not know that nvcc speaks C++20.
  target_compile_options(
    monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-lineinfo;-Xfatbin=-compress-all;
                                 -Xcompiler=-Wall,-Wno-unknown-pragmas>)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  add_library(cuda_kernels OBJECT EXCLUDE_FROM_ALL ${MONOIDREDUCE_CUDA_SOURCES})
  target_link_libraries(cuda_kernels PRIVATE monoidreduce_flags)
  set(MONOIDREDUCE_CUDA_OBJECTS $<TARGET_OBJECTS:cuda_kernels>)
  string(REPLACE "native" "${CMAKE_CUDA_ARCHITECTURES_NATIVE}" architectures "${CMAKE_CUDA_ARCHITECTURES}")
  if(architectures MATCHES "(^|;)(90a?(-real)?|all|all-major)(;|$)")
    add_library(sm90_kernels OBJECT EXCLUDE_FROM_ALL ${MONOIDREDUCE_SM90_SOURCES})
    target_link_libraries(sm90_kernels PRIVATE monoidreduce_flags)
    set_target_properties(sm90_kernels PROPERTIES CUDA_ARCHITECTURES 90a-real)
    target_compile_definitions(cuda_kernels PRIVATE MONOIDREDUCE_WITH_SM90=1)
    list(APPEND MONOIDREDUCE_CUDA_OBJECTS $<TARGET_OBJECTS:sm90_kernels>)
  endif()
endif()
