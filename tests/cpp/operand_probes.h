// Probe matrices: matrix products that show from which places a kernel took the elements of an operand. On the host.
//
// The elements of one operand are the numbers of its lines, or of its depths. The other operand consists of unit vectors,
// each of which selects one number of a line. If an element was taken from a wrong place, the product has the number of that
// place. All are integers that every element type can represent, so products are exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>
#include <vector>

#include "check.h"
#include "simt_tensors.h"

namespace monoidreduce::test {

template <class E>
inline constexpr DType kDType = DType::kFloat32;
template <>
inline constexpr DType kDType<__half> = DType::kFloat16;
template <>
inline constexpr DType kDType<__nv_bfloat16> = DType::kBFloat16;

struct Matrix {
  int rows, columns;
  std::vector<int> values;  // row-major

  // The matrix with the elements value(row, column).
  template <class Value>
  Matrix(int rows, int columns, Value value) : rows(rows), columns(columns) {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) values.push_back(value(i, j));
  }
  int operator()(int i, int j) const { return values[i * columns + j]; }

  Matrix transposed() const {
    return {columns, rows, [this](int i, int j) { return (*this)(j, i); }};
  }
  // A wider matrix that contains this one from column `first` on. Elsewhere it has a number that no probe has.
  Matrix within(int width, int first) const {
    constexpr int kElsewhere = -512;
    return {rows, width, [this, first](int i, int j) {
              return first <= j && j < first + columns ? (*this)(i, j - first) : kElsewhere;
            }};
  }
  HostTensor tensor() const {
    HostTensor t({1, 1, rows, columns});
    t.values.assign(values.begin(), values.end());
    return t;
  }
};

struct Probe {
  std::string name;
  Matrix left, right;  // [rows, depth], [depth, columns]

  Matrix product() const {
    Matrix product(left.rows, right.columns, [](int, int) { return 0; });
    for (int i = 0; i < left.rows; ++i) {
      for (int k = 0; k < right.rows; ++k) {
        if (left(i, k) == 0) continue;
        for (int j = 0; j < right.columns; ++j)
          product.values[i * right.columns + j] += left(i, k) * right(k, j);
      }
    }
    return product;
  }
};

// There may be at most 256 rows, columns and steps of the depth, because bfloat16 has a mantissa of eight bits.
inline std::vector<Probe> operand_probes(int rows, int columns, int depth) {
  std::vector<Probe> probes;
  for (int first = 0; first < depth; first += columns) {
    const Matrix units(depth, columns, [&](int k, int j) { return k == (first + j) % depth; });
    probes.push_back({"rows", {rows, depth, [](int i, int) { return 1 + i; }}, units});
    probes.push_back({"depth of the left operand", {rows, depth, [](int, int k) { return 1 + k; }}, units});
  }
  for (int first = 0; first < depth; first += rows) {
    const Matrix units(rows, depth, [&](int i, int k) { return k == (first + i) % depth; });
    probes.push_back({"columns", units, {depth, columns, [](int, int j) { return 1 + j; }}});
    probes.push_back(
        {"depth of the right operand", units, {depth, columns, [](int k, int) { return 1 + k; }}});
  }
  probes.push_back({"all elements",
                    {rows, depth, [](int i, int k) { return (5 * i + 3 * k) % 7 - 3; }},
                    {depth, columns, [](int k, int j) { return (2 * k + 3 * j) % 5 - 2; }}});
  return probes;
}

// Checks every element of the product that the device computed. Waits for the device.
inline void check_product(Checks& checks, const DeviceTensor& computed, const Probe& probe) {
  const Matrix expected = probe.product();
  const std::vector<double> found = computed.values();
  for (int i = 0; i < expected.rows; ++i) {
    for (int j = 0; j < expected.columns; ++j)
      CHECK(checks, found[i * expected.columns + j] == expected(i, j), i, j, found[i * expected.columns + j],
            expected(i, j));
  }
}

// A tensor for a product that the device is going to write; filled with NaN.
inline DeviceTensor no_product(int rows, int columns) {
  return {HostTensor({1, 1, rows, columns}, std::numeric_limits<double>::quiet_NaN()), DType::kFloat32};
}

}  // namespace monoidreduce::test
