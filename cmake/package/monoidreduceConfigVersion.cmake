# The version is that of the Python package, read from its _version.py. Before 1.0 a minor version may break its users, so only
# the same minor version is compatible.
foreach(package_dir "../../.." "../../monoidreduce")
  if(EXISTS "${CMAKE_CURRENT_LIST_DIR}/${package_dir}/_version.py")
    file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/${package_dir}/_version.py" PACKAGE_VERSION REGEX "^__version__")
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" PACKAGE_VERSION "${PACKAGE_VERSION}")
    break()
  endif()
endforeach()

string(REGEX MATCH "^[0-9]+\\.[0-9]+" series "${PACKAGE_VERSION}")
set(PACKAGE_VERSION_COMPATIBLE FALSE)
set(PACKAGE_VERSION_EXACT FALSE)
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  set(PACKAGE_VERSION_EXACT TRUE)
elseif(PACKAGE_FIND_VERSION VERSION_LESS PACKAGE_VERSION AND PACKAGE_FIND_VERSION VERSION_GREATER_EQUAL series)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
