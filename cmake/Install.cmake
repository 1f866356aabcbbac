# The install prefix is the package folder monoidreduce/ of a wheel.
install(DIRECTORY csrc/include/monoidreduce DESTINATION include COMPONENT development FILES_MATCHING PATTERN "*.h"
                                                                                              PATTERN "*.cuh"
                                                                                              REGEX "/rtc/[a-z_]+$")
install(FILES cmake/package/monoidreduceConfig.cmake cmake/package/monoidreduceConfigVersion.cmake
        DESTINATION share/cmake/monoidreduce COMPONENT development)
if(TARGET _C)
  install(TARGETS _C DESTINATION . COMPONENT module)
endif()
