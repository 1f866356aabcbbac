# The Python module monoidreduce._C: host code (HostCode.cmake), and the CUDA kernels if there are any.
set(objects $<TARGET_OBJECTS:host>)

if(MONOIDREDUCE_WITH_CUDA)
  target_compile_definitions(host PRIVATE MONOIDREDUCE_WITH_CUDA=1 $<$<BOOL:${MONOIDREDUCE_WITH_SM90}>:MONOIDREDUCE_WITH_SM90=1>)
  target_include_directories(host SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  list(APPEND objects ${MONOIDREDUCE_CUDA_OBJECTS})
  set(cuda_version ${CMAKE_CUDA_COMPILER_VERSION})
  list(JOIN CMAKE_CUDA_ARCHITECTURES "," cuda_archs)
endif()

foreach(isa IN LISTS MONOIDREDUCE_CPU_ISAS)
  list(APPEND objects $<TARGET_OBJECTS:cpu_${isa}>)
  if(NOT isa STREQUAL "baseline")
    string(TOUPPER ${isa} ISA)
    target_compile_definitions(host PRIVATE MONOIDREDUCE_WITH_${ISA}=1)
  endif()
endforeach()

# The linker keeps the first of several copies of an inline function. So objects are linked in the order of their instruction
# sets, oldest first: a copy that every processor can run wins over one that needs AVX.
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

# The facts that build_info() reports.
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

# Its stub, for editors and mypy. A module with a sanitizer cannot be loaded by a Python without it.
if(NOT MONOIDREDUCE_SANITIZE)
  add_custom_command(
    TARGET _C
    POST_BUILD
    COMMAND Python::Interpreter "${PROJECT_SOURCE_DIR}/csrc/bindings/stub.py" "$<TARGET_FILE:_C>" "$<TARGET_FILE_DIR:_C>/_C.pyi"
    VERBATIM)
endif()

message(STATUS "monoidreduce ${PROJECT_VERSION}: ${compiler}, CPU code for ${cpu_isas}")
if(MONOIDREDUCE_WITH_CUDA)
  message(STATUS "monoidreduce ${PROJECT_VERSION}: CUDA ${cuda_version} for ${cuda_archs}")
else()
  message(WARNING "monoidreduce ${PROJECT_VERSION}: CPU-only build, CUDA tensors will not be supported: "
                  "${MONOIDREDUCE_CPU_ONLY_REASON}")
endif()
