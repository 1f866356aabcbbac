# Stops with a clear message if the C++ compiler is too old. The build would otherwise fail inside a header.
include(CheckCXXSourceCompiles)

set(CMAKE_CXX_STANDARD 20)
check_cxx_source_compiles(
  "#include <bit>
   #include <concepts>
   enum class Kind { kOne };
   template <std::floating_point T> constexpr unsigned bits(T x) { return std::bit_cast<unsigned>(x); }
   struct Options { int first; int second = 2; };
   int main() {
     using enum Kind;
     return bits(1.0f) == 0 || kOne != Kind::kOne || Options{.first = 1}.second != 2;
   }"
  MONOIDREDUCE_COMPILER_HAS_CXX20)
unset(CMAKE_CXX_STANDARD)
if(NOT MONOIDREDUCE_COMPILER_HAS_CXX20)
  message(FATAL_ERROR "monoidreduce needs a C++20 compiler, such as g++ 11 or later, and ${CMAKE_CXX_COMPILER} "
                      "(${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) is none: install one (Debian: apt install g++), "
                      "or name another by CXX=/path/to/g++")
endif()
