# The C++ tests: the law suite (every monoid obeys its laws, and the suite notices planted mutations), and tests of parts of the
# engines.
include(cmake/CpuIsa.cmake)
include(CheckCXXSourceRuns)
find_package(Threads REQUIRED)
enable_testing()

# HOST_OPTIMIZATION 1: tests need no speed, and most of the time to compile them would go into optimizing.
function(add_cpp_test name source)
  add_executable(${name} ${source})
  set_target_properties(${name} PROPERTIES HOST_OPTIMIZATION 1)
  target_link_libraries(${name} PRIVATE monoidreduce_flags Threads::Threads)
  add_test(NAME ${name} COMMAND ${name})
endfunction()

foreach(test test_laws test_mutations test_monoids test_activation test_score test_thread_pool
             test_tile_schedule test_packing test_stream_k_tail)
  add_cpp_test(${test} tests/cpp/${test}.cpp)
endforeach()

add_cpp_test(test_jobs tests/cpp/test_jobs.cpp)
target_sources(test_jobs PRIVATE csrc/plan/jobs.cpp)

add_cpp_test(example_log_mean_exp examples/cpp/log_mean_exp.cpp)
target_include_directories(example_log_mean_exp PRIVATE tests/cpp)

# The CPU engine's arithmetic, for each instruction set that this processor can run. avx512bf16 has the same packs (SIMD
# vectors) as avx512; only its matrix products differ.
set(feature_avx2 avx2)
set(feature_avx512 avx512bw)
set(pack_isas ${MONOIDREDUCE_CPU_ISAS})
list(REMOVE_ITEM pack_isas avx512bf16)
foreach(isa IN LISTS pack_isas)
  if(NOT isa STREQUAL "baseline")
    check_cxx_source_runs("int main() { return !__builtin_cpu_supports(\"${feature_${isa}}\"); }" MONOIDREDUCE_RUNS_${isa})
  endif()
  if(isa STREQUAL "baseline" OR MONOIDREDUCE_RUNS_${isa})
    add_cpp_test(test_pack_${isa} tests/cpp/test_pack.cpp)
    # GCC fuses products with sums only with -fexpensive-optimizations, and the error bounds hold for fused ones.
    target_compile_options(test_pack_${isa} PRIVATE ${MONOIDREDUCE_CPU_FLAGS_${isa}}
                                                    $<$<CXX_COMPILER_ID:GNU>:-fexpensive-optimizations>)
  endif()
endforeach()

if(MONOIDREDUCE_WITH_CUDA)
  # Compiled in every CUDA build. Linking also needs the kernels, so that is done only on request (scripts/gpu_check.sh).
  add_library(test_simt_objects OBJECT tests/cpp/test_simt_operators.cu tests/cpp/test_simt_monoids.cu)
  set_target_properties(test_simt_objects PROPERTIES HOST_OPTIMIZATION 1)
  target_link_libraries(test_simt_objects PRIVATE monoidreduce_flags)
  add_executable(test_simt EXCLUDE_FROM_ALL $<TARGET_OBJECTS:test_simt_objects> csrc/path_counter.cpp
                                            ${MONOIDREDUCE_CUDA_OBJECTS})
  target_link_libraries(test_simt PRIVATE monoidreduce_flags)

  # Matrix products of probe matrices. Compiled in every CUDA build, and run on a GPU (by tests/gpu/test_operands.py, or
  # directly).
  foreach(tier sm80 sm90)
    add_executable(test_operands_${tier} tests/cpp/test_operands_${tier}.cu)
    set_target_properties(test_operands_${tier} PROPERTIES HOST_OPTIMIZATION 1)
    target_link_libraries(test_operands_${tier} PRIVATE monoidreduce_flags)
  endforeach()
  set_target_properties(test_operands_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)

  # CuTe's headers come with the wheel nvidia-cutlass, in cutlass_library/source/include.
  find_path(MONOIDREDUCE_CUTE_INCLUDE cute/tensor.hpp DOC "folder of CuTe's headers, for a test alone")
  if(MONOIDREDUCE_CUTE_INCLUDE)
    add_cpp_test(test_cute_layouts tests/cpp/test_cute_layouts.cu)
    set_target_properties(test_cute_layouts PROPERTIES CUDA_COMPILER_LAUNCHER "") # CuTe's headers, not a kernel, take memory
    target_include_directories(test_cute_layouts SYSTEM PRIVATE ${MONOIDREDUCE_CUTE_INCLUDE})
  else()
    message(STATUS "No test against CuTe: MONOIDREDUCE_CUTE_INCLUDE names no folder with cute/tensor.hpp")
  endif()

  # A test of what the host code launches: it runs against a CUDA runtime that only records launches (tests/launches). nvcc
  # checks the syntax of device code without compiling it, so all sources take one processor 75 seconds. The runtime has the
  # functions through which code compiled by CUDA 13 launches kernels. GCC from version 11 on can tell which bytes of
  # parameters are padding.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13
     AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU"
     AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 11)
    # Sources are compiled three at a time (unity build), because most of the time goes into headers that all include. Before
    # CMake 3.31 each is compiled alone. The three are far apart in the lists, because neighbours share local names. If a new
    # source has a name in common with the others of its group, change the number of groups.
    set(launching_sources ${MONOIDREDUCE_CUDA_SOURCES} ${MONOIDREDUCE_CUDA_ARCH_SOURCES} ${MONOIDREDUCE_SM90_SOURCES})
    set(group 0)
    foreach(source IN LISTS launching_sources)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP launching_${group})
      math(EXPR group "(${group} + 1) % 18")
    endforeach()
    add_library(launching_code OBJECT EXCLUDE_FROM_ALL ${launching_sources})
    set_target_properties(launching_code PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP CUDA_ARCHITECTURES 90a-virtual
                                                    HOST_OPTIMIZATION 0)
    set_target_properties(launching_code PROPERTIES EXPORT_COMPILE_COMMANDS OFF) # scripts/kernel_code.py reads them
    target_include_directories(launching_code BEFORE PRIVATE tests/launches/described tests)
    target_compile_options(launching_code PRIVATE -fdevice-syntax-only -w)
    target_link_libraries(launching_code PRIVATE monoidreduce_flags)

    add_library(launches OBJECT EXCLUDE_FROM_ALL tests/launches/fake_cudart.cpp tests/launches/no_cpu_engine.cpp
                                tests/launches/calls.cpp csrc/operators.cpp csrc/path_counter.cpp
                                ${MONOIDREDUCE_PLAN_SOURCES})
    set_target_properties(launches PROPERTIES HOST_OPTIMIZATION 0)
    target_compile_definitions(launches PRIVATE MONOIDREDUCE_WITH_CUDA=1 MONOIDREDUCE_WITH_SM90=1)
    target_include_directories(launches PRIVATE tests csrc)
    target_include_directories(launches SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(launches PRIVATE monoidreduce_flags)

    add_executable(launch_trace EXCLUDE_FROM_ALL tests/launches/trace.cpp)
    add_cpp_test(test_launches tests/launches/test_launches.cpp)
    foreach(target launch_trace test_launches)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:launches> $<TARGET_OBJECTS:launching_code>)
      target_include_directories(${target} PRIVATE tests tests/cpp)
      target_link_libraries(${target} PRIVATE monoidreduce_flags)
      set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None)
    endforeach()
  endif()
endif()
