# find_package(attnpack_kernels) gives attnpack::kernels: attnpack/kernels.h and its library, which need no torch.
include("${CMAKE_CURRENT_LIST_DIR}/attnpack_kernelsTargets.cmake")
