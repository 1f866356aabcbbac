# The module monoidreduce._C: the binding, the CPU engine once per instruction set, and the CUDA kernels if there are any.
include(cmake/CpuIsa.cmake)

find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "No Python headers for ${Python_EXECUTABLE}: install them (Debian: apt install python3-dev)")
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
  OUTPUT_VARIABLE pybind11_ROOT
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 2.13 CONFIG REQUIRED)
find_package(Threads REQUIRED)

add_library(host OBJECT ${MONOIDREDUCE_BINDING_SOURCES} ${MONOIDREDUCE_HOST_SOURCES})
target_link_libraries(host PRIVATE monoidreduce_flags pybind11::headers Python::Module)
set(objects $<TARGET_OBJECTS:host>)

if(MONOIDREDUCE_WITH_CUDA)
  target_compile_definitions(host PRIVATE MONOIDREDUCE_WITH_CUDA=1)
  target_include_directories(host SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  list(APPEND objects ${MONOIDREDUCE_CUDA_OBJECTS})
  set(cuda_version ${CMAKE_CUDA_COMPILER_VERSION})
  list(JOIN CMAKE_CUDA_ARCHITECTURES "," cuda_archs)
endif()

foreach(isa IN LISTS MONOIDREDUCE_CPU_ISAS)
  add_library(cpu_${isa} OBJECT ${MONOIDREDUCE_CPU_ISA_SOURCES})
  target_link_libraries(cpu_${isa} PRIVATE monoidreduce_flags)
  target_compile_definitions(cpu_${isa} PRIVATE MR_CPU_ISA=${isa})
  target_compile_options(cpu_${isa} PRIVATE ${MONOIDREDUCE_CPU_FLAGS_${isa}})
  # Half of what each operator takes a compiler is the same for all of them: 16 s together, 28 apart.
  set_target_properties(cpu_${isa} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  if(isa STREQUAL "avx512bf16")
    target_compile_definitions(cpu_${isa} PRIVATE MR_CPU_BFLOAT16_ALONE=1)
  endif()
  list(APPEND objects $<TARGET_OBJECTS:cpu_${isa}>)
  if(NOT isa STREQUAL "baseline")
    string(TOUPPER ${isa} ISA)
    target_compile_definitions(host PRIVATE MONOIDREDUCE_WITH_${ISA}=1)
  endif()
endforeach()

# The linker keeps the first of several copies of an inline function. Objects are linked in the order of their instruction
# sets, oldest first, so that a copy that every processor can run wins over one that needs AVX.
python_add_library(_C MODULE WITH_SOABI ${objects})
set_target_properties(_C PROPERTIES LINKER_LANGUAGE CXX)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  # Some compilers come with a static libstdc++ only. Exported from here, half of it would be taken over by the
  # libstdc++.so that torch loads, and the first exception would crash.
  target_link_options(_C PRIVATE -Wl,--exclude-libs,ALL)
endif()
target_link_libraries(_C PRIVATE monoidreduce_flags Threads::Threads)
if(MONOIDREDUCE_WITH_CUDA)
  target_link_libraries(_C PRIVATE CUDA::cudart_static)
endif()

# What build_info() reports.
list(JOIN MONOIDREDUCE_CPU_ISAS "," cpu_isas)
set(compiler "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
target_compile_definitions(
  host
  PRIVATE MONOIDREDUCE_BUILD_VERSION="${PROJECT_VERSION}"
          MONOIDREDUCE_BUILD_COMPILER="${compiler}"
          MONOIDREDUCE_BUILD_CPU_ISAS="${cpu_isas}"
          MONOIDREDUCE_BUILD_CUDA_VERSION="${cuda_version}"
          MONOIDREDUCE_BUILD_CUDA_ARCHS="${cuda_archs}"
          MONOIDREDUCE_BUILD_CPU_ONLY_REASON="${MONOIDREDUCE_CPU_ONLY_REASON}")

if(MONOIDREDUCE_INPLACE)
  set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/monoidreduce")
endif()

message(STATUS "monoidreduce ${PROJECT_VERSION}: ${compiler}, CPU code for ${cpu_isas}")
if(MONOIDREDUCE_WITH_CUDA)
  message(STATUS "monoidreduce ${PROJECT_VERSION}: CUDA ${cuda_version} for ${cuda_archs}")
else()
  message(WARNING "monoidreduce ${PROJECT_VERSION}: CPU-only build, CUDA tensors will not be supported: "
                  "${MONOIDREDUCE_CPU_ONLY_REASON}")
endif()
