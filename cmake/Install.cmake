# Installs what the wheel carries: library, headers, the package for find_package(attnpack), and build.json. Python
# reads build.json before it loads anything, to learn what the build was made for.
include(CMakePackageConfigHelpers)
set(config_dir share/cmake/attnpack)

install(TARGETS attnpack EXPORT attnpackTargets LIBRARY DESTINATION lib)
install(DIRECTORY csrc/attnpack DESTINATION include FILES_MATCHING PATTERN "*.h"
        REGEX "/(core|detail|ops/(cpu|cuda|meta|autograd|autocast|batched|lazy))$" EXCLUDE)
install(EXPORT attnpackTargets NAMESPACE attnpack:: DESTINATION ${config_dir})
configure_package_config_file(cmake/attnpackConfig.cmake.in attnpackConfig.cmake INSTALL_DESTINATION ${config_dir}
                              NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(attnpackConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/attnpackConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/attnpackConfigVersion.cmake
        cmake/TorchTargets.cmake DESTINATION ${config_dir})
configure_file(cmake/build.json.in build.json @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/build.json DESTINATION share/attnpack)
