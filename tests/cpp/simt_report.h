// Prints one line per case: PASS or FAIL, the case, and the largest error of each result relative to its largest value.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "monoidreduce/error.h"
#include "simt_tensors.h"

namespace monoidreduce::test {

// The largest allowed error, relative to the largest value. A result in the accumulation type is a sum of some hundred terms of
// either sign; a 16-bit result has been rounded once more.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-12;
    case DType::kFloat32:
      return 1e-5;
    case DType::kFloat16:
      return std::ldexp(1, -10);
    default:
      return std::ldexp(1, -7);
  }
}

class Report {
 public:
  explicit Report(std::string only) : only_(std::move(only)) {}

  bool wants(const std::string& name) const { return name.find(only_) != std::string::npos; }

  void begin(const std::string& name) {
    name_ = name;
    line_.clear();
    ok_ = true;
  }
  void compare(const char* what, const DeviceTensor& result, const std::vector<double>& expected) {
    const std::vector<double> got = result.values();
    double largest = 0, error = 0;
    bool same_places = got.size() == expected.size();
    for (std::size_t n = 0; same_places && n < got.size(); ++n) {
      if (std::isfinite(expected[n])) {
        largest = std::max(largest, std::abs(expected[n]));
        error = std::isfinite(got[n]) ? std::max(error, std::abs(got[n] - expected[n])) : INFINITY;
      } else {
        same_places = std::isnan(expected[n]) ? std::isnan(got[n]) : got[n] == expected[n];
      }
      if (!same_places || error == INFINITY) {
        note(false, message(what, "[", n, "] is ", got[n], ", expected ", expected[n]));
        return;
      }
    }
    const double relative = largest > 0 ? error / largest : error;
    char text[64];
    std::snprintf(text, sizeof text, "%s %.1e", what, relative);
    note(same_places && relative <= tolerance(result.dtype()), text);
  }
  void note(bool ok, const std::string& text) {
    ok_ = ok_ && ok;
    line_ += (line_.empty() ? "" : "  ") + text + (ok ? "" : " !!");
  }
  void end() {
    ++(ok_ ? passed_ : failed_);
    std::printf("%s  %-58s %s\n", ok_ ? "PASS" : "FAIL", name_.c_str(), line_.c_str());
    std::fflush(stdout);
  }

  int finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ != 0 || passed_ == 0;
  }

 private:
  std::string only_, name_, line_;
  bool ok_ = true;
  int passed_ = 0, failed_ = 0;
};

}  // namespace monoidreduce::test
