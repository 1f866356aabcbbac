# The module monoidreduce._C: CPU engine once per instruction set, CUDA kernels when there is a toolkit, and the binding.
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

# The linker keeps the first of several copies of an inline function. The link order is that of the instruction sets, oldest
# first, so a copy that all processors may run wins over one that needs AVX.
python_add_library(_C MODULE WITH_SOABI ${MONOIDREDUCE_BINDING_SOURCES} ${MONOIDREDUCE_HOST_SOURCES})
target_link_libraries(_C PRIVATE monoidreduce_flags pybind11::headers Threads::Threads)

foreach(isa IN LISTS MONOIDREDUCE_CPU_ISAS)
  add_library(cpu_${isa} OBJECT ${MONOIDREDUCE_CPU_ISA_SOURCES})
  target_link_libraries(cpu_${isa} PRIVATE monoidreduce_flags)
  target_compile_definitions(cpu_${isa} PRIVATE MR_CPU_ISA=${isa})
  target_compile_options(cpu_${isa} PRIVATE ${MONOIDREDUCE_CPU_FLAGS_${isa}})
  target_sources(_C PRIVATE $<TARGET_OBJECTS:cpu_${isa}>)
  if(NOT isa STREQUAL "baseline")
    string(TOUPPER ${isa} ISA)
    target_compile_definitions(_C PRIVATE MONOIDREDUCE_WITH_${ISA}=1)
  endif()
endforeach()

if(MONOIDREDUCE_WITH_CUDA)
  target_sources(_C PRIVATE $<TARGET_OBJECTS:cuda_kernels>)
  target_link_libraries(_C PRIVATE CUDA::cudart_static)
  target_compile_definitions(_C PRIVATE MONOIDREDUCE_WITH_CUDA=1)
  set(cuda_version ${CMAKE_CUDA_COMPILER_VERSION})
  list(JOIN CMAKE_CUDA_ARCHITECTURES "," cuda_archs)
endif()

# What build_info() reports.
list(JOIN MONOIDREDUCE_CPU_ISAS "," cpu_isas)
set_source_files_properties(
  ${MONOIDREDUCE_BINDING_SOURCES}
  PROPERTIES
    COMPILE_DEFINITIONS
    "MONOIDREDUCE_BUILD_VERSION=\"${PROJECT_VERSION}\";MONOIDREDUCE_BUILD_COMPILER=\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\";MONOIDREDUCE_BUILD_CPU_ISAS=\"${cpu_isas}\";MONOIDREDUCE_BUILD_CUDA_VERSION=\"${cuda_version}\";MONOIDREDUCE_BUILD_CUDA_ARCHS=\"${cuda_archs}\";MONOIDREDUCE_BUILD_CPU_ONLY_REASON=\"${MONOIDREDUCE_CPU_ONLY_REASON}\""
)

if(MONOIDREDUCE_INPLACE)
  set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/monoidreduce")
endif()

message(STATUS "monoidreduce ${PROJECT_VERSION}: ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, CPU code for ${cpu_isas}")
if(MONOIDREDUCE_WITH_CUDA)
  message(STATUS "monoidreduce ${PROJECT_VERSION}: CUDA ${cuda_version} for ${cuda_archs}")
else()
  message(WARNING "monoidreduce ${PROJECT_VERSION}: CPU-only build, CUDA tensors will not be supported: "
                  "${MONOIDREDUCE_CPU_ONLY_REASON}")
endif()
