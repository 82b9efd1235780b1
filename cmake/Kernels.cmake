# attnpack_add_kernels(objects) compiles the kernels once per instruction set, and puts the object files into that
# variable. No precompiled header (the flags differ), hidden symbols, plain C++ and vectors only.
include(CheckCXXCompilerFlag)
set(ATTNPACK_KERNEL_OPTIMISATION -O3 CACHE STRING "optimisation of the kernels")
mark_as_advanced(ATTNPACK_KERNEL_OPTIMISATION)

# Emulates the products of AVX512-BF16 in plain AVX-512, as one more instruction set with the same arithmetic. So a
# machine without AVX512-BF16 can test it. tests/sanitize sets the option; installed builds have no use for it.
option(ATTNPACK_EMULATE_PAIRS "build avx512_bf16_emulated too" OFF)
mark_as_advanced(ATTNPACK_EMULATE_PAIRS)

function(attnpack_add_kernels objects)
  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH root)
  file(GLOB sources CONFIGURE_DEPENDS ${root}/csrc/attnpack/ops/cpu/isa/*.cpp)
  set(names baseline)
  set(definitions "")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|amd64|AMD64")
    list(APPEND names avx2 avx512)
    check_cxx_compiler_flag(-mavx512bf16 ATTNPACK_COMPILER_HAS_AVX512_BF16)
    if(ATTNPACK_COMPILER_HAS_AVX512_BF16)
      list(APPEND names avx512_bf16)
      list(APPEND definitions ATTNPACK_AVX512_BF16)
    endif()
    if(ATTNPACK_EMULATE_PAIRS)
      list(APPEND names avx512_bf16_emulated)
      list(APPEND definitions ATTNPACK_AVX512_BF16_EMULATED)
    endif()
  endif()
  set(flags_baseline "")
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)
  set(flags_avx512_bf16 ${flags_avx512} -mavx512bf16 -mavx512vnni)
  set(flags_avx512_bf16_emulated ${flags_avx512} -DATTNPACK_EMULATE_PAIRS)
  foreach(isa ${names})
    add_library(attnpack_${isa} OBJECT ${sources})
    target_include_directories(attnpack_${isa} PRIVATE ${root}/csrc)
    target_compile_options(attnpack_${isa} PRIVATE
      ${ATTNPACK_KERNEL_OPTIMISATION} -fno-math-errno -fno-trapping-math -fvisibility=hidden -fvisibility-inlines-hidden
      -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Wno-aggressive-loop-optimizations ${flags_${isa}})
    target_compile_definitions(attnpack_${isa} PRIVATE ATTNPACK_ISA=${isa})
    list(APPEND all $<TARGET_OBJECTS:attnpack_${isa}>)  # baseline first: shared inline code must be runnable
  endforeach()
  set(${objects} ${all} PARENT_SCOPE)
  set(ATTNPACK_ISA_NAMES ${names} PARENT_SCOPE)
  set(ATTNPACK_ISA_DEFINITIONS ${definitions} PARENT_SCOPE)  # for files that include isa_table.h
endfunction()
