# What the Python module has besides CUDA kernels, as objects: the binding, and the CPU engine once per instruction set.
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
endforeach()
