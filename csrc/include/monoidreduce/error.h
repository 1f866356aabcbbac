// Errors. They are thrown before any work is done, name the wrong value, and never end the process.
#pragma once

#include <concepts>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

namespace monoidreduce {

// A failure that is not the caller's: a CUDA error, a kernel that this build does not have.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Parts of messages. Without <sstream>, which takes a compiler half a second in every source of a kernel.
inline void append(std::string& text, std::string_view part) { text += part; }
template <std::integral T>
void append(std::string& text, T part) {
  text += std::to_string(part);
}
template <std::floating_point T>
void append(std::string& text, T part) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", static_cast<double>(part));
  text += digits;
}

template <class... Parts>
std::string message(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// A mistake of the caller: throws std::invalid_argument (ValueError in Python). The message names the argument, its value
// and what was expected.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw std::invalid_argument(message(parts...));
}

}  // namespace monoidreduce
