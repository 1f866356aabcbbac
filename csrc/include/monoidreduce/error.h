// Errors. They are thrown before any work is done, name the wrong value, and never end the process.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace monoidreduce {

// A failure that is not the caller's: a CUDA error, a kernel that this build does not have.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// A mistake of the caller: throws std::invalid_argument (ValueError in Python). The message names the argument, its value
// and what was expected.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw std::invalid_argument(message(parts...));
}

}  // namespace monoidreduce
