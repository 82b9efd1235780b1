# attnpack_add_kernels(objects) compiles the kernels once per instruction set, and puts the object files into that
# variable. No precompiled header (the flags differ), hidden symbols, plain C++ and vectors only.
include(CheckCXXCompilerFlag)
# Empty: as below. Not a default of the option, because a build tree would keep it when it changes here.
set(ATTNPACK_KERNEL_OPTIMISATION "" CACHE STRING "optimisation of the kernels, instead of what attnpack chooses")
mark_as_advanced(ATTNPACK_KERNEL_OPTIMISATION)
set(ATTNPACK_ISA_NAMES native CACHE STRING
    "instruction sets of the CPU kernels: native (those that this machine has), all, or a list such as baseline\;avx2")

# Emulates the products of AVX512-BF16 in plain AVX-512, as one more instruction set with the same arithmetic. So a
# machine without AVX512-BF16 can test it. tests/sanitize sets the option; installed builds have no use for it.
option(ATTNPACK_EMULATE_PAIRS "build avx512_bf16_emulated too" OFF)
mark_as_advanced(ATTNPACK_EMULATE_PAIRS)

# All instruction sets that this compiler can build, the plainest first.
function(attnpack_all_isas names)
  set(all baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|amd64|AMD64")
    list(APPEND all avx2 avx512)
    check_cxx_compiler_flag(-mavx512bf16 ATTNPACK_COMPILER_HAS_AVX512_BF16)
    if(ATTNPACK_COMPILER_HAS_AVX512_BF16)
      list(APPEND all avx512_bf16)
    endif()
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
    list(APPEND all neon_dotprod)
    check_cxx_compiler_flag(-march=armv8.2-a+dotprod+i8mm+bf16 ATTNPACK_COMPILER_HAS_NEON_BF16)
    if(ATTNPACK_COMPILER_HAS_NEON_BF16)
      list(APPEND all neon_bf16)
    endif()
  endif()
  set(${names} ${all} PARENT_SCOPE)
endfunction()

# Those of `all` that this machine can run: a program asks the CPU, as isa_table.h does. All of them if it cannot run.
function(attnpack_native_isas names all)
  set(${names} ${all} PARENT_SCOPE)
  if(CMAKE_CROSSCOMPILING)
    return()
  endif()
  file(WRITE ${PROJECT_BINARY_DIR}/native_isas.cpp "#include <cstdio>
#include <attnpack/ops/cpu/isa_present.h>
int main() {
  std::puts(\"baseline\");
#if defined(__x86_64__)
  if (attnpack::has_avx2()) std::puts(\"avx2\");
  if (attnpack::has_avx512()) std::puts(\"avx512\");
  if (attnpack::has_avx512_bf16()) std::puts(\"avx512_bf16\");
#elif defined(__aarch64__)
  if (attnpack::has_neon_dotprod()) std::puts(\"neon_dotprod\");
  if (attnpack::has_neon_bf16()) std::puts(\"neon_bf16\");
#endif
}
")
  # Asked anew each time: a build tree may move to another machine.
  unset(ATTNPACK_NATIVE_EXIT_CODE CACHE)
  try_run(ATTNPACK_NATIVE_EXIT_CODE ATTNPACK_NATIVE_COMPILED ${PROJECT_BINARY_DIR} ${PROJECT_BINARY_DIR}/native_isas.cpp
          CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../csrc CXX_STANDARD 20
          RUN_OUTPUT_VARIABLE present)
  if(ATTNPACK_NATIVE_COMPILED AND ATTNPACK_NATIVE_EXIT_CODE EQUAL 0)
    string(REGEX MATCHALL "[a-z0-9_]+" present "${present}")
    set(native "")
    foreach(isa ${all})
      if(isa IN_LIST present)
        list(APPEND native ${isa})
      endif()
    endforeach()
    set(${names} ${native} PARENT_SCOPE)
  endif()
endfunction()

function(attnpack_add_kernels objects)
  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH root)
  file(GLOB sources CONFIGURE_DEPENDS ${root}/csrc/attnpack/ops/cpu/isa/*.cpp)
  # -O3 takes the compiler up to twice as long, and makes twice the code of decode and linear layers. With GCC, -O2 and
  # these passes of -O3 give its speed. Prefill and the backward pass, which work on tiles, lose 3% without the others
  # (PERFORMANCE.md).
  set(optimisation -O3)
  set(tiles_optimisation -O3)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(optimisation -O2 -fvect-cost-model=dynamic -funswitch-loops -fsplit-loops -fversion-loops-for-strides
                     -fpredictive-commoning -ftree-partial-pre -fgcse-after-reload)
  endif()
  if(ATTNPACK_KERNEL_OPTIMISATION)
    set(optimisation ${ATTNPACK_KERNEL_OPTIMISATION})
    set(tiles_optimisation ${ATTNPACK_KERNEL_OPTIMISATION})
  endif()
  set_source_files_properties(${root}/csrc/attnpack/ops/cpu/isa/prefill.cpp
                              ${root}/csrc/attnpack/ops/cpu/isa/backward.cpp
                              ${root}/csrc/attnpack/ops/cpu/isa/linear_attention.cpp
                              ${root}/csrc/attnpack/ops/cpu/isa/linear_attention_backward.cpp PROPERTIES COMPILE_OPTIONS
                              $<TARGET_PROPERTY:ATTNPACK_TILES_OPTIMISATION>)
  # Small files share the time that headers take.
  foreach(name causal_conv1d machine_speed quantize rms_norm swiglu)
    set_source_files_properties(${root}/csrc/attnpack/ops/cpu/isa/${name}.cpp PROPERTIES UNITY_GROUP small)
  endforeach()
  attnpack_all_isas(all)
  if(ATTNPACK_ISA_NAMES STREQUAL "native")
    attnpack_native_isas(names "${all}")
  elseif(ATTNPACK_ISA_NAMES STREQUAL "all")
    set(names ${all})
  else()
    set(names "")
    foreach(isa ${ATTNPACK_ISA_NAMES})
      if(NOT isa IN_LIST all)
        list(JOIN all ", " known)
        message(FATAL_ERROR "attnpack: ATTNPACK_ISA_NAMES has ${isa}, wants native, all, or some of: ${known}")
      endif()
    endforeach()
    foreach(isa ${all})  # in this order, whatever the order of the option
      # Those that multiply pairs have the kernels for fp64 of the ones before them, and AVX-512 without VNNI has the
      # products with stored weights of AVX2.
      if(isa STREQUAL "baseline" OR isa IN_LIST ATTNPACK_ISA_NAMES OR
         (isa STREQUAL "avx2" AND ATTNPACK_ISA_NAMES MATCHES "avx512") OR
         (isa STREQUAL "avx512" AND "avx512_bf16" IN_LIST ATTNPACK_ISA_NAMES) OR
         (isa STREQUAL "neon_dotprod" AND "neon_bf16" IN_LIST ATTNPACK_ISA_NAMES))
        list(APPEND names ${isa})
      endif()
    endforeach()
  endif()
  if(ATTNPACK_EMULATE_PAIRS AND "avx512" IN_LIST all)
    foreach(isa avx2 avx512)
      if(NOT isa IN_LIST names)
        list(APPEND names ${isa})
      endif()
    endforeach()
    list(APPEND names avx512_bf16_emulated)
  endif()
  message(STATUS "instruction sets: ${names}")
  set(flags_baseline "")
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)
  set(flags_avx512_vnni ${flags_avx512} -mavx512vnni)
  set(flags_avx512_bf16 ${flags_avx512_vnni} -mavx512bf16)
  set(flags_avx512_bf16_emulated ${flags_avx512} -DATTNPACK_EMULATE_PAIRS)
  set(flags_neon_dotprod -march=armv8.2-a+dotprod)
  set(flags_neon_bf16 -march=armv8.2-a+dotprod+i8mm+bf16)
  set(definitions "")
  foreach(isa ${names})
    string(TOUPPER ATTNPACK_HAS_${isa} definition)
    list(APPEND definitions ${definition})
  endforeach()
  # avx512_vnni has only the products with stored weights, for all of AVX-512.
  set(parts ${names})
  if("avx512" IN_LIST names)
    list(APPEND parts avx512_vnni)
  endif()
  foreach(isa ${parts})
    set(sources_of_isa ${sources})
    if(isa STREQUAL "avx512_vnni")
      list(FILTER sources_of_isa INCLUDE REGEX "/stored_linear\\.cpp$")
    elseif(isa MATCHES "^avx512")
      list(FILTER sources_of_isa EXCLUDE REGEX "/stored_linear\\.cpp$")
    endif()
    add_library(attnpack_${isa} OBJECT ${sources_of_isa})
    set(optimisation_of_isa ${optimisation})
    set(tiles_optimisation_of_isa ${tiles_optimisation})
    # Hardly any x86 machine lacks AVX2: its kernels need not be the fastest.
    if(isa STREQUAL "baseline" AND "avx2" IN_LIST all AND NOT ATTNPACK_KERNEL_OPTIMISATION)
      set(optimisation_of_isa -O1)
      set(tiles_optimisation_of_isa -O1)
    endif()
    set_target_properties(attnpack_${isa} PROPERTIES ATTNPACK_TILES_OPTIMISATION "${tiles_optimisation_of_isa}"
                          UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    target_include_directories(attnpack_${isa} PRIVATE ${root}/csrc)
    target_compile_options(attnpack_${isa} PRIVATE
      ${optimisation_of_isa} -fno-math-errno -fno-trapping-math -fvisibility=hidden -fvisibility-inlines-hidden
      -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Wno-aggressive-loop-optimizations ${flags_${isa}})
    target_compile_definitions(attnpack_${isa} PRIVATE ATTNPACK_ISA=${isa})
    list(APPEND kernel_objects $<TARGET_OBJECTS:attnpack_${isa}>)  # baseline first: inline code must be runnable
  endforeach()
  set(${objects} ${kernel_objects} PARENT_SCOPE)
  set(ATTNPACK_ISAS_BUILT ${names} PARENT_SCOPE)
  set(ATTNPACK_ISA_DEFINITIONS ${definitions} PARENT_SCOPE)  # for files that include isa_table.h
endfunction()
