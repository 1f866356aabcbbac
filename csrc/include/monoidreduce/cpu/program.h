// An interpreter for a user's Python function, which was traced and translated to a program (folds/cpu/bytecode.py). Each
// instruction (instructions.h) works on a block of columns by a panel of rows, so decoding it costs little.
//
// A register holds words as wide as a lane, each a real, an integer or a mask. It has room for 64-bit ("wide") integers
// instead. A block register has a word for each column and row; a row register has a word for each row, the same for all
// columns. The code of a row runs first: it computes row registers from constants and the row's data. Then the code of an
// element runs for each block.
//
// A state has, for each softmax: a frame (row max), its mass, and the sums of its means, all measured from the frame. Then
// come totals, then a value and a column for each largest value, then what the first of these carry from that column, then
// counts, then the sums of entropies (entropy.h).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "monoidreduce/cpu/fold_forward.h"
#include "monoidreduce/instructions.h"
#include "monoidreduce/integers.h"
#include "monoidreduce/monoids/entropy.h"
#include "monoidreduce/random.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

inline constexpr int kBlockColumns = 8;

struct Command {
  Instruction operation;
  int to, a, b, c;
};

// Which statistics a program has, and where their fields are in the state.
struct Statistics {
  int softmaxes = 0, means[kStateFields] = {}, totals = 0, largest = 0, carried = 0, counts = 0;
  int entropies = 0, softmax_of[kStateFields] = {};  // of each entropy

  int first_total() const {
    int field = 0;
    for (int i = 0; i < softmaxes; ++i) field += 2 + means[i];
    return field;
  }
  int first_largest() const { return first_total() + totals; }
  int first_carried() const { return first_largest() + 2 * largest; }
  int first_count() const { return first_carried() + carried; }
  int first_entropy() const { return first_count() + counts; }
  int fields() const { return first_entropy() + entropies; }
  // f(first field, number of means)
  template <class F>
  void each_softmax(F f) const {
    for (int i = 0, field = 0; i < softmaxes; field += 2 + means[i++]) f(field, means[i]);
  }
  // f(field of the sum, first field of its softmax)
  template <class F>
  void each_entropy(F f) const {
    for (int e = 0; e < entropies; ++e) {
      int frame = 0;
      for (int i = 0; i < softmax_of[e]; ++i) frame += 2 + means[i];
      f(first_entropy() + e, frame);
    }
  }
};

// A 64-bit integer for each lane, and how many words that is.
template <class T>
using WidePack = Pack<std::int64_t, kLanes<T>>;
template <class T>
inline constexpr int kWideWords = sizeof(std::int64_t) / sizeof(T);
template <class T>
struct alignas(WidePack<T>) RowRegister {
  LanePack<T> at[kPacks * kWideWords<T>];
};
template <class T>
struct alignas(WidePack<T>) BlockRegister {
  LanePack<T> at[kBlockColumns * kPacks * kWideWords<T>];
};

// The tables from which a program gathers numbers by an index: one of reals, one of integers (int64).
template <class T>
struct Tables {
  const T* real = nullptr;
  const std::int64_t* index = nullptr;
  std::int64_t reals = 0, indices = 0;

  Tables(const TensorView& real, const TensorView& index)
      : real(static_cast<const T*>(real.data)),
        index(static_cast<const std::int64_t*>(index.data)),
        reals(real.present() ? real.size[0] : 0),
        indices(index.present() ? index.size[0] : 0) {}
};

// A program together with the data of one call. The program comes as text, a list of numbers: the statistics; how many reals
// and integers the data of rows have, and which of the integers are wide; the same for columns; constants; the code of a row
// and the code of an element.
template <class T>
class Program {
 public:
  using Word = IntegerOf<T>;

  Program(const std::string& text, const Tables<T>& tables, const TensorView& row,
          const TensorView& row_index, const TensorView& column, const TensorView& column_index,
          std::int64_t rows, std::int64_t columns)
      : Program(text, tables, rows, columns) {
    load(row, row_index, of_rows_, rows, row_stride_, row_.get());
    load(column, column_index, of_columns_, columns, columns, column_.get());
  }
  // For rows [batch, heads, rows], with the indices along these three axes as the data of rows.
  Program(const std::string& text, const Tables<T>& tables, std::int64_t batch, std::int64_t heads,
          std::int64_t rows)
      : Program(text, tables, batch * heads * rows, 0) {
    expect(of_rows_.data() == 3 && of_rows_.words() == 3 && of_columns_.data() == 0);
    for (std::int64_t i = 0; i < row_stride_; ++i) {
      const std::int64_t head = i / std::max<std::int64_t>(rows, 1);
      const std::int64_t numbers[] = {head / std::max<std::int64_t>(heads, 1),
                                      head % std::max<std::int64_t>(heads, 1), i - head * rows};
      for (int k = 0; k < 3; ++k) row_.get()[k * row_stride_ + i] = saturated(numbers[k]);
    }
  }

  MR_HD void fill(std::int64_t first_row, RowRegister<T>* registers) const {
    for (int k = 0; k < of_rows_.data(); ++k, ++registers) {
      const int words = of_rows_.words(k);
      std::memcpy(registers->at, row_ + of_rows_.first[k] * row_stride_ + words * first_row,
                  words * kPanel<T> * sizeof(T));
    }
    for (const Constant& c : constants_) {
      for (int half = 0; half < kPacks; ++half) {
        if (c.wide)
          wide(registers->at)[half] = c.integer;
        else
          registers->at[half] = broadcast(c.word);
      }
      ++registers;
    }
  }
  // Checks the sizes of the call's results: rows of values, of low words and of indices.
  void expect_results(std::int64_t values, std::int64_t low, std::int64_t indices) const {
    const Statistics& s = statistics;
    expect(values == s.first_largest() - s.softmaxes + s.largest + s.carried + s.entropies &&
           low == s.softmaxes && indices == s.largest + s.counts);
  }
  const Word* column(int k) const { return column_ + of_columns_.first[k] * columns_; }
  // Elements of the tables. An index out of range is clamped.
  MR_HD T gathered(Word i) const { return tables_.real[std::clamp<std::int64_t>(i, 0, tables_.reals - 1)]; }
  MR_HD std::int64_t gathered_index(Word i) const {
    return tables_.index[std::clamp<std::int64_t>(i, 0, tables_.indices - 1)];
  }
  // Whether the code of an element writes this panel.
  bool writes(int panel) const {
    return std::any_of(code_.begin(), code_.end(), [&](const Command& step) {
      return step.operation == Instruction::kStore && step.to == panel;
    });
  }
  const std::vector<Command>& row_code() const { return row_code_; }
  const std::vector<Command>& code() const { return code_; }

  // The bits of `value` in every lane; they may be those of an integer.
  MR_HD static LanePack<T> broadcast(T value) {
    Word bits;
    std::memcpy(&bits, &value, sizeof(T));
    return {bit_cast_vector<typename LanePack<T>::Vector>(Pack<Word, kLanes<T>>(bits).v)};
  }
  // The same memory, as wide integers.
  MR_HD static WidePack<T>* wide(LanePack<T>* at) { return reinterpret_cast<WidePack<T>*>(at); }
  MR_HD static const WidePack<T>* wide(const LanePack<T>* at) {
    return reinterpret_cast<const WidePack<T>*>(at);
  }

 private:
  // How the data of a row, or of a column, is laid out: reals, then integers. first[k]: how many words come before datum k.
  struct Data {
    int reals;
    std::vector<int> first;
    int data() const { return static_cast<int>(first.size()) - 1; }
    int words() const { return first.back(); }
    int words(int k) const { return first[k + 1] - first[k]; }
  };
  struct Constant {
    bool wide;
    std::int64_t integer;
    T word;  // the bits of a real or of an integer of a word
  };

  Program(const std::string& text, const Tables<T>& tables, std::int64_t rows, std::int64_t columns)
      : at_(text.data()),
        end_(text.data() + text.size()),
        tables_(tables),
        statistics(read_statistics()),
        of_rows_(read_data(kRowRegisters)),
        of_columns_(read_data(1 << 20)),
        row_stride_(rows + kPanel<T>),  // a panel may begin at any row
        columns_(columns),
        constants_(count(kRowRegisters)),
        row_(of_rows_.words() * row_stride_),
        column_(of_columns_.words() * columns) {
    for (Constant& c : constants_) {
      const int kind = count(2);
      c.wide = kind == 2, c.integer = number();
      const Word integer = static_cast<Word>(c.integer);
      std::memcpy(&c.word, &integer, sizeof(T));
      if (kind == 1) {
        double value;
        std::memcpy(&value, &c.integer, sizeof(value));
        c.word = static_cast<T>(value);
      }
    }
    expect(of_rows_.data() + constants_.size() <= kRowRegisters);
    read(row_code_, true);
    read(code_, false);
    expect(at_ == end_);
  }

  static void expect(bool holds) {
    if (!holds) throw std::invalid_argument("program: expected the code of this version of monoidreduce");
  }
  std::int64_t number() {
    while (at_ < end_ && *at_ == ' ') ++at_;
    const bool negative = at_ < end_ && *at_ == '-';
    at_ += negative;
    expect(at_ < end_ && *at_ >= '0' && *at_ <= '9');
    std::uint64_t value = 0;
    for (; at_ < end_ && *at_ >= '0' && *at_ <= '9'; ++at_) value = 10 * value + (*at_ - '0');
    return static_cast<std::int64_t>(negative ? -value : value);
  }
  int count(std::int64_t most) {
    const std::int64_t n = number();
    expect(n >= 0 && n <= most);
    return static_cast<int>(n);
  }

  Statistics read_statistics() {
    Statistics s;
    s.softmaxes = count(kStateFields / 2);
    for (int i = 0; i < s.softmaxes; ++i) s.means[i] = count(kStateFields);
    s.totals = count(kStateFields), s.largest = count(kStateFields), s.carried = count(s.largest);
    s.counts = count(kStateFields);
    s.entropies = count(s.softmaxes);
    for (int e = 0; e < s.entropies; ++e) s.softmax_of[e] = count(s.softmaxes - 1);
    expect(s.fields() <= kStateFields);
    return s;
  }

  Data read_data(int most) {
    const int reals = count(most), integers = count(most);
    Data data{reals, {0}};
    for (int k = 0; k < reals + integers; ++k)
      data.first.push_back(data.words() + (k < reals || count(1) == 0 ? 1 : kWideWords<T>));
    expect(data.data() <= most);
    return data;
  }

  void read(std::vector<Command>& steps, bool of_row) {
    steps.resize(count(kMostSteps));
    for (Command& step : steps) {
      step.operation = static_cast<Instruction>(count(static_cast<int>(Instruction::kStore)));
      for (int* operand : {&step.to, &step.a, &step.b, &step.c}) *operand = count(1 << 20);
      check(step, of_row);
    }
  }

  // Checks that every register, field and datum that a step uses exists.
  void check(const Command& s, bool of_row) const {
    const int registers = kBlockRegisters + kRowRegisters;
    const auto masses = [&](int frame, int least) {
      bool found = false;
      statistics.each_softmax([&](int field, int means) { found |= field == frame && least <= 1 + means; });
      return found;
    };
    const auto is_entropy = [&](int field, int frame) {
      bool found = false;
      statistics.each_entropy([&](int sum, int of) { found |= sum == field && of == frame; });
      return found;
    };
    const bool on_state = s.operation >= Instruction::kFrame;
    const bool weight = s.operation == Instruction::kWeight;
    if (!on_state || weight)
      expect(of_row ? s.to >= kBlockRegisters && s.to < registers : s.to < kBlockRegisters);
    expect(!(of_row && (on_state || s.operation <= Instruction::kPosition)));
    switch (s.operation) {
      case Instruction::kColumn:
        return expect(s.a < of_columns_.data());
      case Instruction::kWideColumn:
        return expect(s.a < of_columns_.data() && of_columns_.words(s.a) == kWideWords<T>);
      case Instruction::kFrame:
        return expect(s.a < registers && masses(s.to, s.b) && (s.c == 0 || is_entropy(s.c, s.to)));
      case Instruction::kWeight:
        return expect(s.a < registers && masses(s.b, 1));
      case Instruction::kEntropy:
        return expect(s.a < registers && s.b < registers && is_entropy(s.to, s.c));
      case Instruction::kLargest:
        return expect(s.a < registers && s.b < registers && s.to + 1 < kStateFields && s.c < kStateFields);
      case Instruction::kResult:
      case Instruction::kStore:
        return expect(s.a < registers && s.to < kPanels);
      case Instruction::kGather:
        return expect(s.a < registers && tables_.reals > 0);
      case Instruction::kIndexGather:
      case Instruction::kWideGather:
        return expect(s.a < registers && tables_.indices > 0);
      default:
        expect(s.a < registers && s.b < registers && s.c < registers);
        expect(!on_state || weight || s.to < kStateFields);
    }
  }

  static Word saturated(std::int64_t x) {
    return static_cast<Word>(
        std::clamp<std::int64_t>(x, std::numeric_limits<Word>::min(), std::numeric_limits<Word>::max()));
  }

  // Copies real data, then integers. Each has `count` elements, and room for `stride`.
  static void load(const TensorView& real, const TensorView& index, const Data& data, std::int64_t count,
                   std::int64_t stride, Word* to) {
    const std::int64_t reals = real.present() ? real.size[0] : 0,
                       indices = index.present() ? index.size[0] : 0;
    expect(reals == data.reals && reals + indices == data.data());
    for (int k = 0; k < data.data(); ++k) {
      const int words = data.words(k);
      if (k < reals) {
        load_row(real, k * real.stride[0], real.stride[1], count, reinterpret_cast<T*>(to), 1);
      } else {
        const auto* from = static_cast<const std::int64_t*>(index.data) + (k - reals) * index.stride[0];
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t x = from[i * index.stride[1]];
          if (words == 1)
            to[i] = saturated(x);
          else
            std::memcpy(to + words * i, &x, sizeof(x));
        }
      }
      std::fill(to + words * count, to + words * stride, Word(0));
      to += words * stride;
    }
  }

  const char *at_, *end_;  // the part of the text that has not been parsed yet
  const Tables<T> tables_;

 public:
  const Statistics statistics;

 private:
  const Data of_rows_, of_columns_;
  const std::int64_t row_stride_, columns_;
  std::vector<Constant> constants_;
  Scratch<Word> row_, column_;
  std::vector<Command> row_code_, code_;
};

// log of every lane, with an error of at most 2 units in the last place. With x = 2^n m and m around 1, log(m) is the series
// of 2 artanh(s), where s = (m - 1) / (m + 1).
template <class T, int N>
MR_HD Pack<T, N> log_of_each(Pack<T, N> x) {
  using R = Pack<T, N>;
  using I = Pack<IntegerOf<T>, N>;
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52, kBias = sizeof(T) == 4 ? 127 : 1023;
  constexpr T kLeast = std::numeric_limits<T>::min();
  const auto subnormal = x < R(kLeast);
  const R scaled = select(subnormal, x * R(T(1LL << kMantissa)), x);
  // m is between sqrt(1/2) and sqrt(2): n changes where the mantissa passes sqrt(2).
  constexpr IntegerOf<T> kRoot = sizeof(T) == 4 ? 0x3504f3 : static_cast<IntegerOf<T>>(0x6a09e667f3bcdLL);
  const auto bits = bit_cast_vector<typename I::Vector>(scaled.v);
  const auto raised = bits + ((IntegerOf<T>(1) << kMantissa) - kRoot);
  const auto n = (raised >> kMantissa) - kBias;
  const R m = bit_cast_vector<typename R::Vector>(bits - (n << kMantissa));
  const R exponent = R(I(n)) - select(subnormal, R(T(kMantissa)), R(0));
  const R s = (m - R(1)) / (m + R(1)), square = s * s;
  R series;
  if constexpr (sizeof(T) == 4) {
    series = polynomial(square, {1. / 3, 1. / 5, 1. / 7, 1. / 9});
  } else {
    series = polynomial(
        square, {1. / 3, 1. / 5, 1. / 7, 1. / 9, 1. / 11, 1. / 13, 1. / 15, 1. / 17, 1. / 19, 1. / 21});
  }
  // n ln(2) in two words. The first has so few digits that the product is exact.
  constexpr double kHigh = sizeof(T) == 4 ? 0.693145751953125 : 0.69314718036912381649;
  constexpr double kLow = sizeof(T) == 4 ? 1.42860682030941723e-6 : 1.9082149292705877e-10;
  const R of_mantissa = s * R(2) + s * square * series * R(2);
  R result = exponent * R(T(kHigh)) + (of_mantissa + exponent * R(T(kLow)));
  result = select(x == R(0), -infinity<R>(), result);
  result = select(x == infinity<R>(), x, result);
  return select(x < R(0), R(std::numeric_limits<T>::quiet_NaN()), select(x == x, result, x));
}
// log(1 + x). The rounding error of 1 + x is corrected by a factor of the logarithm.
template <class T, int N>
MR_HD Pack<T, N> log1p_of_each(Pack<T, N> x) {
  using R = Pack<T, N>;
  const R sum = R(1) + x, added = sum - R(1);
  const R factor = select(sum == infinity<R>(), R(1), x / added);
  return select(added == R(0), x, log_of_each(sum) * factor);
}
template <class T, int N>
MR_HD Pack<T, N> expm1_of_each(Pack<T, N> x) {
  using R = Pack<T, N>;
  const R power = exp(x), less = power - R(1);
  const R near = less * (x / log_of_each(power));
  return select(power == R(1), x, select(abs(x) < R(0.5), near, less));
}
// Larger than every column index, so that a real score of -inf can still be the largest of a row.
template <class T>
inline constexpr IntegerOf<T> kNoColumn = std::numeric_limits<IntegerOf<T>>::max();

// Whether x, in column j, counts as larger than y, in column k. NaN is the largest; among equal values, the first column's is.
template <class R>
MR_HD Mask<R> is_larger(R x, Index<R> j, R y, Index<R> k) {
  const Mask<R> tie = (x == y) | ((x != x) & (y != y));
  return (x > y) | ((x != x) & (y == y)) | (tie & (j < k));
}

// Runs the code of rows and of elements, for a panel of rows at a time.
template <class T>
class Interpreter {
  using R = LanePack<T>;
  using I = Index<R>;
  using M = Mask<R>;
  using W = WidePack<T>;
  using WideMask = PackMask<std::int64_t, kLanes<T>>;

 public:
  explicit Interpreter(const Program<T>& program) : program_(program) {}

  R field[kStateFields][kPacks];  // the state of the tile

  void begin(std::int64_t first_row) {
    program_.fill(first_row, row_);
    run(program_.row_code(), 1);
  }
  // Runs the code of an element for the columns of a tile. panels: [columns][kPanel] each, those of the dot products first;
  // first_column: the index of the tile's first column; scale: what makes scores of dot products.
  void run_tile(const std::array<T*, kPanels>& panels, std::int64_t first_column, std::int64_t columns,
                T scale) {
    scale_ = scale;
    for (std::int64_t j = 0; j < columns; j += kBlockColumns) {
      for (int k = 0; k < kPanels; ++k) panel_[k] = panels[k] + j * kPanel<T>;
      column_ = first_column + j;
      run(program_.code(), static_cast<int>(std::min<std::int64_t>(kBlockColumns, columns - j)));
    }
  }

 private:
  // An operand of an instruction: packs of words, or of wide integers. step: from one column to the next, 0 for a row register.
  template <class X>
  struct OperandOf {
    const X* at;
    int step;
  };
  using Operand = OperandOf<R>;
  using WideOperand = OperandOf<W>;
  MR_HD Operand operand(int number) const {
    return number < kBlockRegisters ? Operand{block_[number].at, kPacks}
                                    : Operand{row_[number - kBlockRegisters].at, 0};
  }
  MR_HD static WideOperand wide(Operand x) { return {Program<T>::wide(x.at), x.step}; }
  MR_HD R* result(int number) {
    return number < kBlockRegisters ? block_[number].at : row_[number - kBlockRegisters].at;
  }
  MR_HD W* wide_result(int number) { return Program<T>::wide(result(number)); }

  template <class To, class A, class F>
  MR_HD static void map(To* to, int columns, OperandOf<A> a, F f) {
    for (int j = 0; j < columns; ++j, to += kPacks, a.at += a.step) {
      for (int half = 0; half < kPacks; ++half) to[half] = f(a.at[half]);
    }
  }
  template <class To, class A, class B, class F>
  MR_HD static void map(To* to, int columns, OperandOf<A> a, OperandOf<B> b, F f) {
    for (int j = 0; j < columns; ++j, to += kPacks, a.at += a.step, b.at += b.step) {
      for (int half = 0; half < kPacks; ++half) to[half] = f(a.at[half], b.at[half]);
    }
  }
  template <class To, class A, class B, class C, class F>
  MR_HD static void map(To* to, int columns, OperandOf<A> a, OperandOf<B> b, OperandOf<C> c, F f) {
    for (int j = 0; j < columns; ++j, to += kPacks, a.at += a.step, b.at += b.step, c.at += c.step) {
      for (int half = 0; half < kPacks; ++half) to[half] = f(a.at[half], b.at[half], c.at[half]);
    }
  }
  // total[half] += the sum of f(column, half). The block is summed first: rounding errors grow with the number of additions
  // to a large sum. Two sums are in progress at a time, so that an addition need not wait for the previous one.
  template <class F>
  MR_HD static void sum(R (&total)[kPacks], int columns, F f) {
    R first[kPacks], second[kPacks];
    for (int half = 0; half < kPacks; ++half) first[half] = second[half] = R(-0.f);
    int j = 0;
    for (; j + 1 < columns; j += 2) {
      for (int half = 0; half < kPacks; ++half) {
        first[half] = first[half] + f(j, half), second[half] = second[half] + f(j + 1, half);
      }
    }
    for (int half = 0; half < kPacks; ++half) {
      if (j < columns) first[half] = first[half] + f(j, half);
      total[half] = total[half] + (first[half] + second[half]);
    }
  }

  MR_HD static I index(R x) { return {bit_cast_vector<typename I::Vector>(x.v)}; }
  MR_HD static M mask(R x) { return {bit_cast_vector<typename M::Vector>(x.v)}; }
  MR_HD static R word(I x) { return {bit_cast_vector<typename R::Vector>(x.v)}; }
  MR_HD static R word(M x) { return {bit_cast_vector<typename R::Vector>(x.v)}; }
  MR_HD static R origin(R f) { return LogSumExp<R>::origin(f); }

  void run(const std::vector<Command>& steps, int n) {
    for (const Command& command : steps) run(command, n);
  }

  MR_HD void run(const Command& s, int n) {
    const Operand a = operand(s.a), b = operand(s.b), c = operand(s.c);
    switch (s.operation) {
      case Instruction::kScore:
        return load_scores(result(s.to), panel_[0], n);
      case Instruction::kOther:
        return load_scores(result(s.to), panel_[1], n);
      case Instruction::kColumn:
        for (int j = 0; j < n; ++j) {
          T value;
          std::memcpy(&value, program_.column(s.a) + column_ + j, sizeof(T));
          for (int half = 0; half < kPacks; ++half)
            result(s.to)[j * kPacks + half] = Program<T>::broadcast(value);
        }
        return;
      case Instruction::kWideColumn:
        for (int j = 0; j < n; ++j) {
          std::int64_t value;
          std::memcpy(&value, program_.column(s.a) + kWideWords<T> * (column_ + j), sizeof(value));
          for (int half = 0; half < kPacks; ++half) wide_result(s.to)[j * kPacks + half] = value;
        }
        return;
      case Instruction::kPosition:
        for (int j = 0; j < n; ++j) {
          const R position = word(I(static_cast<IntegerOf<T>>(column_ + j)));
          for (int half = 0; half < kPacks; ++half) result(s.to)[j * kPacks + half] = position;
        }
        return;
      case Instruction::kNeg:
        return map(result(s.to), n, a, [](R x) { return -x; });
      case Instruction::kAbs:
        return map(result(s.to), n, a, [](R x) { return abs(x); });
      case Instruction::kExp:
        return map(result(s.to), n, a, [](R x) { return exp(x); });
      case Instruction::kExpm1:
        return map(result(s.to), n, a, [](R x) { return expm1_of_each(x); });
      case Instruction::kLog:
        return map(result(s.to), n, a, [](R x) { return log_of_each(x); });
      case Instruction::kLog1p:
        return map(result(s.to), n, a, [](R x) { return log1p_of_each(x); });
      case Instruction::kLog1pExp:
        return map(result(s.to), n, a, [](R x) { return max(x, R(0)) + log1p_of_each(exp(-abs(x))); });
      case Instruction::kSqrt:
        return map(result(s.to), n, a, [](R x) { return each_lane(x, [](T t) { return std::sqrt(t); }); });
      case Instruction::kSin:
        return map(result(s.to), n, a, [](R x) { return each_lane(x, [](T t) { return std::sin(t); }); });
      case Instruction::kCos:
        return map(result(s.to), n, a, [](R x) { return each_lane(x, [](T t) { return std::cos(t); }); });
      case Instruction::kAtan:
        return map(result(s.to), n, a, [](R x) { return each_lane(x, [](T t) { return std::atan(t); }); });
      case Instruction::kFloor:
        return map(result(s.to), n, a, [](R x) { return each_lane(x, [](T t) { return std::floor(t); }); });
      case Instruction::kRound:
        return map(result(s.to), n, a,
                   [](R x) { return each_lane(x, [](T t) { return std::nearbyint(t); }); });
      case Instruction::kTanh:
        return map(result(s.to), n, a, [](R x) { return tanh(x); });
      case Instruction::kErf:
        return map(result(s.to), n, a, [](R x) { return erf(x); });
      case Instruction::kSigmoid:
        return map(result(s.to), n, a, [](R x) { return sigmoid(x); });
      case Instruction::kAdd:
        return map(result(s.to), n, a, b, [](R x, R y) { return x + y; });
      case Instruction::kSub:
        return map(result(s.to), n, a, b, [](R x, R y) { return x - y; });
      case Instruction::kMul:
        return map(result(s.to), n, a, b, [](R x, R y) { return x * y; });
      case Instruction::kDiv:
        return map(result(s.to), n, a, b, [](R x, R y) { return x / y; });
      case Instruction::kPow:
        return map(result(s.to), n, a, b,
                   [](R x, R y) { return each_lane(x, y, [](T t, T u) { return std::pow(t, u); }); });
      case Instruction::kFmod:
        return map(result(s.to), n, a, b,
                   [](R x, R y) { return each_lane(x, y, [](T t, T u) { return std::fmod(t, u); }); });
      case Instruction::kMaximum:  // NaN if either is NaN
        return map(result(s.to), n, a, b, [](R x, R y) { return select((x > y) | (x != x), x, y); });
      case Instruction::kMinimum:
        return map(result(s.to), n, a, b, [](R x, R y) { return select((x < y) | (x != x), x, y); });
      case Instruction::kShare:
        return map(result(s.to), n, a, b, c,
                   [](R x, R high, R low) { return exp_of_difference(x, origin(high), low); });
      case Instruction::kWhere:
      case Instruction::kIndexWhere:
        return map(result(s.to), n, a, b, c, [](R k, R x, R y) { return select(mask(k), x, y); });
      case Instruction::kLt:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(x < y); });
      case Instruction::kLe:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(x <= y); });
      case Instruction::kEq:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(x == y); });
      case Instruction::kAnd:
      case Instruction::kIndexAnd:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(mask(x) & mask(y)); });
      case Instruction::kOr:
      case Instruction::kIndexOr:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(mask(x) | mask(y)); });
      case Instruction::kNot:
        return map(result(s.to), n, a, [](R x) { return word(!mask(x)); });
      case Instruction::kToReal:
        return map(result(s.to), n, a, [](R x) { return R(index(x)); });
      case Instruction::kIndexAdd:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(index(x) + index(y)); });
      case Instruction::kIndexSub:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(index(x) - index(y)); });
      case Instruction::kIndexMul:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(index(x) * index(y)); });
      case Instruction::kIndexDiv:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(quotient(index(x), index(y))); });
      case Instruction::kIndexMod:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(remainder(index(x), index(y))); });
      case Instruction::kIndexLt:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(index(x) < index(y)); });
      case Instruction::kIndexLe:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(index(x) <= index(y)); });
      case Instruction::kIndexEq:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(index(x) == index(y)); });
      case Instruction::kWithin:
        return map(result(s.to), n, a, b, [](R x, R y) { return word(within(index(x), index(y))); });
      case Instruction::kWiden:
        return map(wide_result(s.to), n, a, [](R x) { return W(index(x)); });
      case Instruction::kWideToReal:
        return map(result(s.to), n, wide(a), [](const W& x) { return R(x); });
      case Instruction::kWideAdd:
        return map(wide_result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return signed_of(unsigned_of(x) + unsigned_of(y)); });
      case Instruction::kWideSub:
        return map(wide_result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return signed_of(unsigned_of(x) - unsigned_of(y)); });
      case Instruction::kWideMul:
        return map(wide_result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return signed_of(unsigned_of(x) * unsigned_of(y)); });
      case Instruction::kWideDiv:
        return map(wide_result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return quotient(x, y); });
      case Instruction::kWideMod:
        return map(wide_result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return remainder(x, y); });
      case Instruction::kWideAnd:
        return map(wide_result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return W(x.v & y.v); });
      case Instruction::kWideOr:
        return map(wide_result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return W(x.v | y.v); });
      case Instruction::kWideLt:
        return map(result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return word(narrowed(x < y)); });
      case Instruction::kWideLe:
        return map(result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return word(narrowed(x <= y)); });
      case Instruction::kWideEq:
        return map(result(s.to), n, wide(a), wide(b),
                   [](const W& x, const W& y) { return word(narrowed(x == y)); });
      case Instruction::kWideWhere:
        return map(wide_result(s.to), n, a, wide(b), wide(c),
                   [](R k, const W& x, const W& y) { return select(widened(mask(k)), x, y); });
      case Instruction::kWideWithin:
        return map(result(s.to), n, wide(a), b,
                   [](const W& x, R size) { return word(I(within(x, W(index(size))))); });
      case Instruction::kWideStream:
        return map(wide_result(s.to), n, wide(a), wide(b), [](const W& seed, const W& leading) {
          W x;
          for (int lane = 0; lane < kLanes<T>; ++lane) x.v[lane] = wide_stream(seed.v[lane], leading.v[lane]);
          return x;
        });
      case Instruction::kWideUniform:
      case Instruction::kWideUniform16:
        return map(result(s.to), n, wide(a), b, c,
                   [of_16 = s.operation == Instruction::kWideUniform16](const W& stream, R row, R column) {
                     const I i = index(row), j = index(column);
                     R x;
                     for (int lane = 0; lane < kLanes<T>; ++lane) {
                       x.v[lane] = of_16 ? uniform_16<T>(stream.v[lane], i.v[lane], j.v[lane])
                                         : uniform<T>(stream.v[lane], i.v[lane], j.v[lane]);
                     }
                     return x;
                   });
      case Instruction::kGather:
        return gather(result(s.to), a, s.b, n, [this](IntegerOf<T> i) { return program_.gathered(i); });
      case Instruction::kIndexGather:
        return gather(result(s.to), a, s.b, n, [this](IntegerOf<T> i) {
          const auto found = static_cast<IntegerOf<T>>(program_.gathered_index(i));
          T word;
          std::memcpy(&word, &found, sizeof(T));
          return word;
        });
      case Instruction::kWideGather:
        return gather(wide_result(s.to), a, s.b, n,
                      [this](IntegerOf<T> i) { return program_.gathered_index(i); });
      case Instruction::kFrame:
        return raise_frame(s.to, a, s.b, s.c, n);
      case Instruction::kWeight: {
        R* const to = result(s.to);
        const R frame[kPacks] = {origin(field[s.b][0]), origin(field[s.b][1])};
        map(to, n, a, Operand{frame, 0}, [](R x, R f) { return exp(x - f); });
        return sum(field[s.b + 1], n, [&](int j, int half) { return to[j * kPacks + half]; });
      }
      case Instruction::kMean:
        return sum(field[s.to], n, [&](int j, int half) {
          const R product = a.at[j * a.step + half] * b.at[j * b.step + half];
          return select(c.at[j * c.step + half] == -infinity<R>(), R(0), product);
        });
      case Instruction::kEntropy:
        return sum(field[s.to], n, [&](int j, int half) {
          const R gap = b.at[j * b.step + half] - origin(field[s.c][half]);
          return a.at[j * a.step + half] * Entropy<R>::finite(gap);
        });
      case Instruction::kTotal:
        return sum(field[s.to], n, [&](int j, int half) { return a.at[j * a.step + half]; });
      case Instruction::kLargest:
        return find_row_max(field[s.to], field[s.to + 1], a, s.c > 0 ? field[s.c] : nullptr, b, n);
      case Instruction::kCount:
        for (int j = 0; j < n; ++j) {
          for (int half = 0; half < kPacks; ++half)
            field[s.to][half] = word(index(field[s.to][half]) - index(a.at[j * a.step + half]));
        }
        return;
      case Instruction::kResult:
        return store(panel_[s.to], a, R(scale_), n);
      case Instruction::kStore:
        return store(panel_[s.to], a, R(1), n);
    }
  }

  MR_HD static void store(T* to, Operand a, R factor, int n) {
    for (int j = 0; j < n; ++j) {
      for (int half = 0; half < kPacks; ++half)
        (a.at[j * a.step + half] * factor).store(to + j * kPanel<T> + half * kLanes<T>);
    }
  }

  // uniform: the index is the same in all lanes. `to` may be the register of the index.
  template <class To, class F>
  MR_HD static void gather(To* to, Operand a, bool uniform, int n, F found) {
    for (int j = 0; j < n; ++j, to += kPacks, a.at += a.step) {
      const I at[kPacks] = {index(a.at[0]), index(a.at[1])};
      if (uniform) {
        if constexpr (std::is_same_v<To, W>)
          to[0] = to[1] = found(at[0].v[0]);
        else
          to[0] = to[1] = Program<T>::broadcast(found(at[0].v[0]));
        continue;
      }
      for (int half = 0; half < kPacks; ++half) {
        for (int lane = 0; lane < kLanes<T>; ++lane) to[half].v[lane] = found(at[half].v[lane]);
      }
    }
  }

  // The + 0 keeps the compiler from fusing the product with a later operation, so forward and backward see the same score.
  MR_HD void load_scores(R* to, const T* dot, int n) const {
    for (int j = 0; j < n * kPacks; ++j) to[j] = R::load(dot + j * kLanes<T>) * R(scale_) + R(0);
  }

  // Raises a softmax's frame to the largest log weight of the block, and rescales its mass and sums. As in LogSumExp, a frame
  // is never +inf, and NaN does not become one. entropy: the field of the entropy's sum, 0 if there is none.
  MR_HD void raise_frame(int first, Operand a, int masses, int entropy, int n) {
    const LogSumExp<R> softmax{};
    R raised[kPacks] = {field[first][0], field[first][1]};
    for (int j = 0; j < n; ++j) {
      for (int half = 0; half < kPacks; ++half)
        raised[half] = softmax.join(raised[half], a.at[j * a.step + half]);
    }
    for (int half = 0; half < kPacks; ++half) {
      R& frame = field[first][half];
      raised[half] = select(raised[half] == infinity<R>(), largest<R>(), raised[half]);
      if (!any(raised[half] != frame)) continue;
      const R factor = softmax.rescale(frame, raised[half]), rise = monoidreduce::raised(frame, raised[half]);
      frame = raised[half];
      for (int k = 1; k <= masses; ++k) field[first + k][half] = field[first + k][half] * factor;
      if (entropy == 0) continue;
      const R moved = Entropy<R>::moved(field[entropy][half], factor, field[first + 1][half], rise);
      field[entropy][half] = select(factor == R(0), R(0), moved);
    }
  }

  // Updates a row's largest value and its column; and `carried`, unless it is null, to the value b of that column. Most blocks
  // have no value above the largest so far. The first loop finds that out, and they are done.
  MR_HD void find_row_max(R (&value)[kPacks], R (&column)[kPacks], Operand a, R* carried, Operand b,
                          int n) const {
    for (int half = 0; half < kPacks; ++half) {
      M larger = index(column[half]) == I(kNoColumn<T>);
      for (int j = 0; j < n; ++j) larger = larger | !(a.at[j * a.step + half] <= value[half]);
      if (!any(larger)) continue;
      for (int j = 0; j < n; ++j) {
        const R x = a.at[j * a.step + half];
        const I position(static_cast<IntegerOf<T>>(column_ + j));
        const M take = is_larger(x, position, value[half], index(column[half]));
        value[half] = select(take, x, value[half]);
        column[half] = word(select(take, position, index(column[half])));
        if (carried != nullptr) carried[half] = select(take, b.at[j * b.step + half], carried[half]);
      }
    }
  }

  template <class X>
  MR_HD static X quotient(X x, X y) {
    X q;
    for (int lane = 0; lane < kLanes<T>; ++lane) q.v[lane] = floor_of_quotient(x.v[lane], y.v[lane]);
    return q;
  }
  template <class X>
  MR_HD static X remainder(X x, X y) {
    X r;
    for (int lane = 0; lane < kLanes<T>; ++lane) r.v[lane] = floor_remainder(x.v[lane], y.v[lane]);
    return r;
  }
  // Wide arithmetic is done in unsigned integers, which may overflow in C++.
  using U = Pack<std::uint64_t, kLanes<T>>;
  MR_HD static U unsigned_of(const W& x) {
    U y;
    std::memcpy(&y, &x, sizeof(U));
    return y;
  }
  MR_HD static W signed_of(const U& x) {
    W y;
    std::memcpy(&y, &x, sizeof(W));
    return y;
  }
  // Conversions between masks of words and masks of wide integers.
  MR_HD static M narrowed(WideMask x) { return {__builtin_convertvector(x.v, typename M::Vector)}; }
  MR_HD static WideMask widened(M x) { return {__builtin_convertvector(x.v, typename WideMask::Vector)}; }
  // i as an index into an axis of this size: negative ones count from the end, and an index out of range is clamped.
  template <class X>
  MR_HD static X within(X i, X size) {
    const X from_0 = select(i < X(0), i + select(i < X(0), size, X(0)), i), last = size - X(1);
    return select(from_0 < X(0), X(0), select(from_0 < last, from_0, last));
  }

  const Program<T>& program_;
  T *panel_[kPanels] = {}, scale_ = 0;
  std::int64_t column_ = 0;
  BlockRegister<T> block_[kBlockRegisters];
  RowRegister<T> row_[kRowRegisters];
};

// The forward pass of a program, as a monoid.
template <class R>
struct ProgramFold {
  using Real = R;
  using T = Scalar<R>;
  static constexpr bool kFoldsTiles = true;
  static constexpr int kScores = 2;  // the operands of the second score may be absent
  // Masses and sums are in two words: of 100,000 columns, one word had lost 10 times as much as torch.sum does.
  struct State {
    R field[kStateFields], low[kStateFields];
  };
  // Fields with the log-sum-exp in two words instead of frame and mass, and means and entropies instead of sums.
  struct Output {
    R field[kStateFields];
  };
  using Upstream = R;
  const Program<T>* program;

  MR_HD static R word(Index<R> x) {
    R y;
    std::memcpy(&y, &x, sizeof(R));
    return y;
  }
  MR_HD static Index<R> index(R x) {
    Index<R> y;
    std::memcpy(&y, &x, sizeof(R));
    return y;
  }

  State identity() const {
    const Statistics& s = program->statistics;
    State state;
    std::fill_n(state.field, kStateFields, R(-0.f));
    std::fill_n(state.low, kStateFields, R(0));
    s.each_softmax(
        [&](int frame, int) { state.field[frame] = -infinity<R>(), state.field[frame + 1] = R(0); });
    for (int k = s.first_largest(); k < s.first_carried(); k += 2)
      state.field[k] = -infinity<R>(), state.field[k + 1] = word(Index<R>(kNoColumn<T>));
    std::fill_n(state.field + s.first_carried(), s.carried, -infinity<R>());
    for (int k = s.first_count(); k < s.first_entropy(); ++k) state.field[k] = word(Index<R>(0));
    return state;
  }
  State combine(const State& a, const State& b) const {
    const Statistics& s = program->statistics;
    State c;
    const auto put_sum = [&](int k, LogNumber<R> of_a, LogNumber<R> of_b) {
      const LogNumber<R> sum = of_a + of_b;
      c.field[k] = sum.high, c.low[k] = sum.low;
    };
    const auto add = [&](int k, R of_a, R of_b) {
      put_sum(k, {a.field[k] * of_a, a.low[k] * of_a}, {b.field[k] * of_b, b.low[k] * of_b});
    };
    s.each_softmax([&](int frame, int means) {
      const LogSumExp<R> softmax{};
      const R f = softmax.join(a.field[frame], b.field[frame]);
      const R of_a = softmax.rescale(a.field[frame], f), of_b = softmax.rescale(b.field[frame], f);
      c.field[frame] = f;
      for (int k = frame + 1; k < frame + 2 + means; ++k) add(k, of_a, of_b);
    });
    for (int k = s.first_total(); k < s.first_largest(); ++k) add(k, R(1), R(1));
    for (int n = 0, k = s.first_largest(); n < s.largest; ++n, k += 2) {
      const auto take = is_larger(b.field[k], index(b.field[k + 1]), a.field[k], index(a.field[k + 1]));
      const auto put = [&](int i) { c.field[i] = select(take, b.field[i], a.field[i]); };
      put(k), put(k + 1);
      if (n < s.carried) put(s.first_carried() + n);
    }
    for (int k = s.first_count(); k < s.first_entropy(); ++k)
      c.field[k] = word(index(a.field[k]) + index(b.field[k]));
    s.each_entropy([&](int k, int frame) {
      const auto moved = [&](const State& from) {
        const R kept = LogSumExp<R>{}.rescale(from.field[frame], c.field[frame]);
        const R rise = raised(from.field[frame], c.field[frame]);
        const R high = Entropy<R>::moved(from.field[k], kept, from.field[frame + 1] * kept, rise);
        const R low = Entropy<R>::moved(from.low[k], kept, from.low[frame + 1] * kept, rise);
        return LogNumber<R>{select(kept == R(0), R(0), high), select(kept == R(0), R(0), low)};
      };
      put_sum(k, moved(a), moved(b));
    });
    return c;
  }
  Output project(const State& state) const {
    const Statistics& s = program->statistics;
    Output out;
    std::copy_n(state.field, kStateFields, out.field);
    const auto whole = [&](int k) { return state.field[k] + state.low[k]; };
    for (int k = s.first_total(); k < s.first_largest(); ++k) out.field[k] = whole(k);
    s.each_entropy([&](int k, int frame) { out.field[k] = Entropy<R>::of(whole(frame + 1), whole(k)); });
    s.each_softmax([&](int frame, int means) {
      const R mass = whole(frame + 1);
      const LogNumber<R> lse = LogNumber<R>{state.field[frame], R(0)} + log_number(mass);
      out.field[frame] = lse.high, out.field[frame + 1] = lse.low;
      for (int k = frame + 2; k < frame + 2 + means; ++k)
        out.field[k] = select(mass == R(0), R(0), whole(k) / mass);
    });
    for (int k = s.first_largest() + 1; k < s.first_carried(); k += 2) {
      const Index<R> column = index(state.field[k]);
      out.field[k] = word(select(column == Index<R>(kNoColumn<T>), Index<R>(-1), column));
    }
    return out;
  }
};
template <class R>
typename ProgramFold<R>::State combine(const ProgramFold<R>& m, const typename ProgramFold<R>::State& a,
                                       const typename ProgramFold<R>::State& b) {
  return m.combine(a, b);
}

// Folds a tile into the states of a panel. The tile has a state of its own, which starts with the panel's frames and is
// combined with the panel's state once.
template <bool kPlain, class M, class Tile, class T>
  requires FoldsTiles<M>
inline void fold_panel(const M& m, const Tile& tile, std::int64_t columns, typename M::State (&state)[kPacks],
                       T* scores, T* other_scores, bool, LanePack<T> (&)[kPacks]) {
  Interpreter<T> interpreter(*m.program);
  const int fields = m.program->statistics.fields();
  typename M::State sum = m.identity();
  for (int half = 0; half < kPacks; ++half) {
    for (int k = 0; k < fields; ++k) interpreter.field[k][half] = sum.field[k];
    m.program->statistics.each_softmax(
        [&](int frame, int) { interpreter.field[frame][half] = state[half].field[frame]; });
  }
  interpreter.begin(tile.rows.first);
  interpreter.run_tile({scores, other_scores}, tile.first_column, columns, tile.score.scale);
  for (int half = 0; half < kPacks; ++half) {
    for (int k = 0; k < fields; ++k) sum.field[k] = interpreter.field[k][half];
    state[half] = m.combine(state[half], sum);  // sum.low is 0
  }
}

// The backward pass of a program. It computes the derivatives with respect to the scores; the row's statistics and upstream
// gradients, which it needs, are data of the row.
template <class R>
struct ProgramPull {
  using Real = R;
  using T = Scalar<R>;
  static constexpr bool kFoldsTiles = true;
  static constexpr int kScores = 2;
  using State = R;
  using Output = R;
  using Upstream = R;
  const Program<T>* program;

  template <class Tile>
  void pull_tile(const Tile& tile, std::int64_t columns, T* dz, T* other_dz) const {
    Interpreter<T> interpreter(*program);
    interpreter.begin(tile.rows.first);
    interpreter.run_tile({dz, other_dz}, tile.first_column, columns, tile.score.scale);
  }
};

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
