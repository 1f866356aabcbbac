# The parts of the Python module other than CUDA kernels, as objects: the binding, and the CPU engine once per instruction set.
include(cmake/CpuIsa.cmake)

find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
if(NOT Python_Interpreter_FOUND)
  message(FATAL_ERROR "monoidreduce needs Python 3.10 or later: name one by -DPython_EXECUTABLE=/path/to/python3")
endif()
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "No Python headers for ${Python_EXECUTABLE}: install them (Debian: apt install python3-dev)")
endif()
set(MONOIDREDUCE_MINIMUM_PYBIND11 2.13)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import pybind11; print(pybind11.get_cmake_dir(), pybind11.__version__, sep=';')"
  OUTPUT_VARIABLE pybind11_found
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT pybind11_found)
  set(pybind11_found ";none")
endif()
list(GET pybind11_found 0 pybind11_ROOT)
list(GET pybind11_found 1 pybind11_found)
if(NOT pybind11_found VERSION_GREATER_EQUAL MONOIDREDUCE_MINIMUM_PYBIND11)
  message(FATAL_ERROR "monoidreduce needs pybind11 ${MONOIDREDUCE_MINIMUM_PYBIND11} or later to build, found "
                      "${pybind11_found}: ${Python_EXECUTABLE} -m pip install 'pybind11>=${MONOIDREDUCE_MINIMUM_PYBIND11}'")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 CONFIG REQUIRED)
find_package(Threads REQUIRED)

add_library(host OBJECT ${MONOIDREDUCE_BINDING_SOURCES} ${MONOIDREDUCE_HOST_SOURCES})
target_link_libraries(host PRIVATE monoidreduce_flags pybind11::headers Python::Module)

foreach(isa IN LISTS MONOIDREDUCE_CPU_ISAS)
  add_library(cpu_${isa} OBJECT ${MONOIDREDUCE_CPU_ISA_SOURCES})
  target_link_libraries(cpu_${isa} PRIVATE monoidreduce_flags)
  target_compile_definitions(cpu_${isa} PRIVATE MR_CPU_ISA=${isa})
  # -Wno-psabi: packs of 64-bit integers are wider than a register. Every function that takes one is inlined, so their ABI
  # does not matter.
  target_compile_options(cpu_${isa} PRIVATE ${MONOIDREDUCE_CPU_FLAGS_${isa}} -Wno-psabi)
  # A unity build, because half of the time to compile an operator goes into the same headers: 16 s together, 28 s apart.
  set_target_properties(cpu_${isa} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  if(isa STREQUAL "avx512bf16")
    target_compile_definitions(cpu_${isa} PRIVATE MR_CPU_BFLOAT16_ALONE=1)
  endif()
endforeach()
