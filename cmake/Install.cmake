# Installs into the package folder monoidreduce/ of a wheel, which is the install prefix.
install(DIRECTORY csrc/include/monoidreduce DESTINATION include COMPONENT development FILES_MATCHING PATTERN "*.h"
                                                                                              PATTERN "*.cuh"
                                                                                              REGEX "/rtc/[a-z_]+$")
install(FILES cmake/package/monoidreduceConfig.cmake cmake/package/monoidreduceConfigVersion.cmake
        DESTINATION share/cmake/monoidreduce COMPONENT development)
if(TARGET _C)
  install(TARGETS _C DESTINATION . COMPONENT module)
  install(FILES "$<TARGET_FILE_DIR:_C>/_C.pyi" DESTINATION . COMPONENT module OPTIONAL)
endif()
