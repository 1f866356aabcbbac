# The CUDA kernels: objects for the Python module and for their C++ test.
include(cmake/CudaToolchain.cmake)

if(MONOIDREDUCE_WITH_CUDA)
  # 20011 to 20015: a kernel calls a host function. nvcc only warns of one that is constexpr, and what the call returns is undefined.
  target_compile_options(monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--diag-error=20011,20012,20013,20014,20015>)
  # The standard as a flag: CMake 3.25, which Debian 12 has, does not know that nvcc speaks C++20.
  target_compile_options(
    monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-Xfatbin=-compress-all;
                                 -Xcompiler=-Wall,-Wno-unknown-pragmas>)
  # Kernels were fitted to the registers that CUDA 13 finds for 8.0 and 9.0. Who builds otherwise is not refused a kernel
  # that is a little slower.
  set(other_archs ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER other_archs EXCLUDE REGEX "^(80|90a?)(-real|-virtual)?$")
  set(fitted OFF)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13 AND NOT other_archs)
    set(fitted ON)
  endif()
  option(MONOIDREDUCE_PTXAS_GATE "Fail where a kernel spills registers, its products wait for each other, or a compiler takes much memory" ${fitted})
  if(MONOIDREDUCE_PTXAS_GATE)
    set(most_spilled 32) # bytes: a few values that a tile needs once
    set(most_memory 1048576) # KiB
    # Before any other launcher: a compiler cache repeats what the compiler printed.
    target_compile_options(monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
    set(CMAKE_CUDA_COMPILER_LAUNCHER sh ${CMAKE_CURRENT_LIST_DIR}/ptxas_gate.sh ${most_spilled}
                                     ${most_memory} ${CMAKE_CUDA_COMPILER_LAUNCHER})
  endif()
  # The compiler's -O is for the host's code, which launches kernels; theirs is ptxas's, 3. nvcc puts it behind all that
  # -Xcompiler says.
  string(REPLACE "-O3" "" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
  target_compile_options(monoidreduce_flags
                         INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-O$<IF:$<STREQUAL:${host_optimization},>,2,${host_optimization}>>)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  add_library(cuda_kernels OBJECT EXCLUDE_FROM_ALL ${MONOIDREDUCE_CUDA_SOURCES})
  target_link_libraries(cuda_kernels PRIVATE monoidreduce_flags)
  add_library(cuda_arch_kernels OBJECT EXCLUDE_FROM_ALL ${MONOIDREDUCE_CUDA_ARCH_SOURCES})
  target_link_libraries(cuda_arch_kernels PRIVATE monoidreduce_flags)
  set(MONOIDREDUCE_CUDA_OBJECTS $<TARGET_OBJECTS:cuda_kernels> $<TARGET_OBJECTS:cuda_arch_kernels>)
  string(REPLACE "native" "${CMAKE_CUDA_ARCHITECTURES_NATIVE}" architectures "${CMAKE_CUDA_ARCHITECTURES}")

  # Machine code for every architecture is made of one PTX, the oldest's: a compiler's way to PTX is as long as the way on.
  if(architectures MATCHES "^[0-9]+(-real|-virtual)?(;[0-9]+(-real|-virtual)?)+$")
    list(TRANSFORM architectures REPLACE "-.*" "" OUTPUT_VARIABLE numbers)
    list(SORT numbers COMPARE NATURAL)
    list(GET numbers 0 oldest)
    set(codes ${architectures})
    list(FILTER codes EXCLUDE REGEX "-virtual$")
    list(TRANSFORM codes REPLACE "([0-9]+).*" "sm_\\1")
    if(architectures MATCHES "[0-9](;|$)|-virtual")
      list(APPEND codes compute_${oldest})
    endif()
    list(JOIN codes "," codes)
    set_target_properties(cuda_kernels PROPERTIES CUDA_ARCHITECTURES OFF)
    target_compile_options(cuda_kernels PRIVATE "--generate-code=arch=compute_${oldest},code=[${codes}]")
  endif()

  if(architectures MATCHES "(^|;)(90a?(-real)?|all|all-major)(;|$)")
    add_library(sm90_kernels OBJECT EXCLUDE_FROM_ALL ${MONOIDREDUCE_SM90_SOURCES})
    target_link_libraries(sm90_kernels PRIVATE monoidreduce_flags)
    set_target_properties(sm90_kernels PROPERTIES CUDA_ARCHITECTURES 90a-real)
    set(MONOIDREDUCE_WITH_SM90 ON)
    list(APPEND MONOIDREDUCE_CUDA_OBJECTS $<TARGET_OBJECTS:sm90_kernels>)
  endif()
endif()
