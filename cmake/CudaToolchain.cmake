# Decides whether this build has CUDA. Only the toolkit counts: the build machine need not have a GPU.
#
#   MONOIDREDUCE_CUDA        AUTO (use nvcc if it works, otherwise CPU-only), ON (a working nvcc is required), OFF
#   MONOIDREDUCE_CUDA_ARCHS  architectures in CMake's notation, separated by ";" or ","
#
# Both are read from the CMake cache, or else from the environment. Sets MONOIDREDUCE_WITH_CUDA and, for a CPU-only build,
# MONOIDREDUCE_CPU_ONLY_REASON.

# SASS for 8.x and 9.0; later GPUs (10.x, 12.x) compile the PTX for 9.0 when the module is first loaded. The kernels use
# no instruction that is tied to one architecture, so two machine-code images serve every GPU from sm_80 to sm_120. Most
# sources have PTX for 8.0 instead (CudaKernels.cmake).
set(MONOIDREDUCE_DEFAULT_CUDA_ARCHS "80-real;90-real;90-virtual")
set(MONOIDREDUCE_MINIMUM_NVCC 12.0) # C++20

foreach(name MONOIDREDUCE_CUDA MONOIDREDUCE_CUDA_ARCHS)
  if(NOT DEFINED ${name} AND DEFINED ENV{${name}})
    set(${name} "$ENV{${name}}")
  endif()
endforeach()
if(NOT MONOIDREDUCE_CUDA)
  if(DEFINED MONOIDREDUCE_CUDA AND NOT MONOIDREDUCE_CUDA STREQUAL "")
    set(MONOIDREDUCE_CUDA OFF)
  else()
    set(MONOIDREDUCE_CUDA AUTO)
  endif()
endif()
string(TOUPPER "${MONOIDREDUCE_CUDA}" MONOIDREDUCE_CUDA)
if(NOT MONOIDREDUCE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MONOIDREDUCE_CUDA=${MONOIDREDUCE_CUDA}: expected AUTO, ON or OFF")
endif()

set(MONOIDREDUCE_WITH_CUDA OFF)
if(MONOIDREDUCE_CUDA STREQUAL "OFF")
  set(MONOIDREDUCE_CPU_ONLY_REASON "MONOIDREDUCE_CUDA=OFF")
else()
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE) # forget an earlier probe that failed
  endif()
  # nvcc is passed through the environment. With CMAKE_CUDA_COMPILER set, check_language() would not try it, and a broken nvcc
  # would end the build instead of making it CPU-only.
  if(NOT DEFINED ENV{CUDACXX})
    find_program(MONOIDREDUCE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(MONOIDREDUCE_NVCC)
      set(ENV{CUDACXX} "${MONOIDREDUCE_NVCC}")
    endif()
  endif()

  if(DEFINED ENV{CUDACXX})
    include(CheckLanguage)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    string(REPLACE "," ";" MONOIDREDUCE_CUDA_ARCHS "${MONOIDREDUCE_CUDA_ARCHS}")
    if(MONOIDREDUCE_CUDA_ARCHS)
      set(CMAKE_CUDA_ARCHITECTURES "${MONOIDREDUCE_CUDA_ARCHS}")
    elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
      set(CMAKE_CUDA_ARCHITECTURES "${MONOIDREDUCE_DEFAULT_CUDA_ARCHS}")
    endif()
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS MONOIDREDUCE_MINIMUM_NVCC)
      set(MONOIDREDUCE_CPU_ONLY_REASON
          "${CMAKE_CUDA_COMPILER} is version ${CMAKE_CUDA_COMPILER_VERSION}, older than ${MONOIDREDUCE_MINIMUM_NVCC}")
    else()
      set(MONOIDREDUCE_WITH_CUDA ON)
      find_package(CUDAToolkit REQUIRED)
    endif()
  elseif(DEFINED ENV{CUDACXX})
    set(MONOIDREDUCE_CPU_ONLY_REASON "$ENV{CUDACXX} cannot compile a trivial program")
  else()
    set(MONOIDREDUCE_CPU_ONLY_REASON "no nvcc on PATH, in CUDA_HOME, or in /usr/local/cuda/bin")
  endif()

  if(MONOIDREDUCE_CUDA STREQUAL "ON" AND NOT MONOIDREDUCE_WITH_CUDA)
    message(FATAL_ERROR "MONOIDREDUCE_CUDA=ON, but ${MONOIDREDUCE_CPU_ONLY_REASON}. Install NVIDIA's CUDA toolkit "
                        "${MONOIDREDUCE_MINIMUM_NVCC} or later with a C++ compiler that it supports, or name one by "
                        "CUDA_HOME=/path/to/cuda; MONOIDREDUCE_CUDA=OFF builds for CPUs alone")
  endif()
endif()
