# The CUDA kernels, as objects for the Python module and for a C++ test.
include(cmake/CudaToolchain.cmake)

if(MONOIDREDUCE_WITH_CUDA)
  # 20011 to 20015: a kernel calls a host function. If that is constexpr nvcc only warns, but the call returns garbage.
  target_compile_options(monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--diag-error=20011,20012,20013,20014,20015>)
  # -std=c++20 is an explicit flag, because CMake 3.25 (Debian 12) does not know that nvcc supports C++20.
  target_compile_options(
    monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-Xfatbin=-compress-all;
                                 -Xcompiler=-Wall,-Wno-unknown-pragmas>)
  # Kernels were tuned to the register allocation of CUDA 13 for 8.0 and 9.0. With another compiler or architecture a kernel may
  # spill and be a little slower, and the build must not fail for that.
  set(other_archs ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER other_archs EXCLUDE REGEX "^(80|90a?)(-real|-virtual)?$")
  set(fitted OFF)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13 AND NOT other_archs)
    set(fitted ON)
  endif()
  option(MONOIDREDUCE_PTXAS_GATE "Fail where a kernel spills registers, its products wait for each other, or a compiler takes much memory" ${fitted})
  # Kernels without optimization spill.
  option(MONOIDREDUCE_UNOPTIMIZED_KERNELS "Compile kernels in a third of the time, where none will run" OFF)
  if(MONOIDREDUCE_UNOPTIMIZED_KERNELS)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
      target_compile_options(monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
    endif()
  elseif(MONOIDREDUCE_PTXAS_GATE)
    set(most_spilled 32) # bytes; a few values that are needed once per tile
    set(most_memory 1048576) # KiB
    # The gate comes before any other launcher, such as a compiler cache, which repeats what the compiler printed.
    target_compile_options(monoidreduce_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
    set(CMAKE_CUDA_COMPILER_LAUNCHER sh ${CMAKE_CURRENT_LIST_DIR}/ptxas_gate.sh ${most_spilled}
                                     ${most_memory} ${CMAKE_CUDA_COMPILER_LAUNCHER})
  endif()
  # nvcc's -O applies to the host code, which launches kernels; device code is optimized by ptxas, at its default -O3. nvcc
  # puts -O after everything in -Xcompiler, so it cannot be overridden there.
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

  # 90a is for Hopper's own kernels alone; the others are compiled for the rest of the architectures.
  set(all_architectures ${architectures})
  list(FILTER architectures EXCLUDE REGEX "^90a")
  if(NOT architectures)
    set(architectures ${all_architectures})
  endif()
  set_target_properties(cuda_kernels cuda_arch_kernels PROPERTIES CUDA_ARCHITECTURES "${architectures}")

  # The machine code for all architectures is made from the PTX of the oldest one: compiling to PTX takes as long as the rest.
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

  if(all_architectures MATCHES "(^|;)(90a?(-real)?|90a-virtual|all|all-major)(;|$)")
    add_library(sm90_kernels OBJECT EXCLUDE_FROM_ALL ${MONOIDREDUCE_SM90_SOURCES})
    target_link_libraries(sm90_kernels PRIVATE monoidreduce_flags)
    set_target_properties(sm90_kernels PROPERTIES CUDA_ARCHITECTURES 90a-real)
    if("90a-virtual" IN_LIST all_architectures)
      set_target_properties(sm90_kernels PROPERTIES CUDA_ARCHITECTURES 90a-virtual)
    endif()
    set(MONOIDREDUCE_WITH_SM90 ON)
    list(APPEND MONOIDREDUCE_CUDA_OBJECTS $<TARGET_OBJECTS:sm90_kernels>)
  endif()
endif()
