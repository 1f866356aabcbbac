# Sets MONOIDREDUCE_CPU_ISAS, the instruction sets that the compiler can produce code for on this processor family,
# and MONOIDREDUCE_CPU_FLAGS_<isa>, their compiler flags. "baseline" is the oldest processor of the family; it is always
# included.
include(CheckCXXCompilerFlag)

set(MONOIDREDUCE_CPU_ISAS baseline)
set(MONOIDREDUCE_CPU_FLAGS_baseline "")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(MONOIDREDUCE_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c)
  # 512-bit vectors must be requested: compilers prefer 256 bits, for the sake of the first AVX-512 processors.
  set(MONOIDREDUCE_CPU_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
  set(MONOIDREDUCE_CPU_FLAGS_avx512bf16 ${MONOIDREDUCE_CPU_FLAGS_avx512} -mavx512bf16)
  foreach(isa avx2 avx512 avx512bf16)
    list(JOIN MONOIDREDUCE_CPU_FLAGS_${isa} " " flags)
    check_cxx_compiler_flag("${flags}" MONOIDREDUCE_COMPILER_HAS_${isa})
    if(MONOIDREDUCE_COMPILER_HAS_${isa})
      list(APPEND MONOIDREDUCE_CPU_ISAS ${isa})
    endif()
  endforeach()
endif()
