# attnpack_add_kernels(objects): the kernels compiled once per instruction set, and their object files in that variable.
# No precompiled header (other flags), hidden symbols, plain C++ and vectors only.
set(ATTNPACK_KERNEL_OPTIMISATION -O3 CACHE STRING "optimisation of the kernels")
mark_as_advanced(ATTNPACK_KERNEL_OPTIMISATION)

function(attnpack_add_kernels objects)
  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH root)
  file(GLOB sources CONFIGURE_DEPENDS ${root}/csrc/ops/cpu/isa/*.cpp)
  # <attnpack/...> is csrc/ here and include/attnpack/ once installed.
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/include)
  file(CREATE_LINK ${root}/csrc ${CMAKE_BINARY_DIR}/include/attnpack SYMBOLIC)
  set(names baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|amd64|AMD64")
    list(APPEND names avx2 avx512)
  endif()
  set(flags_baseline "")
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)
  foreach(isa ${names})
    add_library(attnpack_${isa} OBJECT ${sources})
    target_include_directories(attnpack_${isa} PRIVATE ${CMAKE_BINARY_DIR}/include)
    target_compile_options(attnpack_${isa} PRIVATE
      ${ATTNPACK_KERNEL_OPTIMISATION} -fno-math-errno -fno-trapping-math -fvisibility=hidden -fvisibility-inlines-hidden
      -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Wno-aggressive-loop-optimizations ${flags_${isa}})
    target_compile_definitions(attnpack_${isa} PRIVATE ATTNPACK_ISA=${isa})
    list(APPEND all $<TARGET_OBJECTS:attnpack_${isa}>)  # baseline first: shared inline code must be runnable
  endforeach()
  set(${objects} ${all} PARENT_SCOPE)
  set(ATTNPACK_ISA_NAMES ${names} PARENT_SCOPE)
endfunction()
