// A minimal test framework. A test is a main() that makes checks and ends with `return checks.finish();`.
#pragma once

#include <cstdio>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace monoidreduce::test {

template <class T>
void print(std::ostream& out, const T& value) {
  out << value;
}
template <class T>
void print(std::ostream& out, const std::vector<T>& values) {
  out << "{";
  for (std::size_t i = 0; i < values.size(); ++i) print(out << (i ? ", " : ""), values[i]);
  out << "}";
}

class Checks {
 public:
  // quiet: count failures without printing them.
  explicit Checks(bool quiet = false) : quiet_(quiet) {}

  // Names the checks that follow, "LogSumExp<float>: associativity".
  void section(const std::string& subject, const std::string& law) {
    law_ = law;
    section_ = subject + ": " + law;
  }

  template <class... Values>
  void record(bool ok, const char* file, int line, const char* expression, const char* names,
              const Values&... values) {
    ++(ok ? passed_ : failed_);
    if (ok) return;
    ++broken_[law_];
    if (quiet_ || ++shown_[section_] > kShownPerSection) return;
    std::ostringstream text;
    text << std::setprecision(17) << file << ":" << line << ": " << section_ << ": failed: " << expression;
    if constexpr (sizeof...(values) > 0) {
      text << "\n    (" << names << ") =";
      ((print(text << " ", values)), ...);
    }
    std::cerr << text.str() << "\n";
  }

  long passed() const { return passed_; }
  long failed() const { return failed_; }
  // How often each law failed.
  const std::map<std::string, int>& broken() const { return broken_; }

  // Prints the counts, and returns the exit status of the test.
  int finish() const {
    std::printf("%ld passed, %ld failed\n", passed_, failed_);
    return failed_ != 0 || passed_ == 0;
  }

 private:
  static constexpr int kShownPerSection = 3;
  bool quiet_;
  long passed_ = 0, failed_ = 0;
  std::string law_, section_;
  std::map<std::string, int> broken_, shown_;
};

}  // namespace monoidreduce::test

// CHECK(checks, condition, values...): a failure prints the condition and the values.
#define CHECK(checks, condition, ...) \
  (checks).record((condition), __FILE__, __LINE__, #condition, #__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__)
