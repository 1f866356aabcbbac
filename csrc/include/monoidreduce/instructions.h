// The instructions of the CPU engine's interpreter (cpu/program.h). Python writes programs of them (program/bytecode.py):
// it takes names and limits from here.
#pragma once

namespace monoidreduce {

enum class Instruction {
  // to = the element's scores; number a of the column's data; the column's number
  kScore,
  kOther,
  kColumn,
  kPosition,
  // to = f(a), f(a, b), f(a, b, c) of reals
  kNeg,
  kAbs,
  kExp,
  kExpm1,
  kLog,
  kLog1p,
  kLog1pExp,
  kSqrt,
  kSin,
  kCos,
  kAtan,
  kFloor,
  kRound,  // half to even
  kTanh,
  kErf,
  kSigmoid,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kPow,
  kFmod,
  kMaximum,
  kMinimum,
  kShare,
  kWhere,
  kLt,
  kLe,
  kEq,
  // of masks
  kAnd,
  kOr,
  kNot,
  // of integers
  kToReal,
  kIndexAdd,
  kIndexSub,
  kIndexMul,
  kIndexDiv,
  kIndexMod,
  kIndexLt,
  kIndexLe,
  kIndexEq,
  kIndexWhere,
  // to = element a of the call's table of reals, of integers; b: is a the same for all rows
  kGather,
  kIndexGather,
  // of the row's state: to is a field of it
  kFrame,    // the frame that holds log weights a, for b masses that follow it
  kWeight,   // to (a register) = exp(a - frame), added to the mass; b is the frame's field
  kMean,     // += a b, the weight times the value, where the log weight c is not -inf
  kTotal,    // += a
  kLargest,  // the largest a, and its column in the next field
  kCount,    // += 1 where a
  // a times the scale of scores, or a as it is, becomes the element's number in panel `to`
  kResult,
  kStore,
};
inline constexpr const char* kInstructionNames[] = {
    "score", "other", "column", "position", "neg", "abs", "exp", "expm1", "log", "log1p", "log1pexp", "sqrt",
    "sin", "cos", "atan", "floor", "round", "tanh", "erf", "sigmoid", "add", "sub", "mul", "div", "pow",
    "fmod", "maximum", "minimum", "share", "where", "lt", "le", "eq", "and", "or", "not", "to_real",
    "index_add", "index_sub", "index_mul", "index_div", "index_mod", "index_lt", "index_le", "index_eq",
    "index_where", "gather", "index_gather", "frame", "weight", "mean", "total", "largest", "count",
    "result", "store"};
static_assert(sizeof(kInstructionNames) / sizeof(char*) == static_cast<int>(Instruction::kStore) + 1);

// Registers of a block of columns come first, then registers of a row. A program may have fewer, and touches no others.
inline constexpr int kBlockRegisters = 128, kRowRegisters = 512, kStateFields = 32;
// Of the code of a row, and of that of an element.
inline constexpr int kMostSteps = 1 << 14;
// Panels of numbers of elements. The panels of the two scores come first.
inline constexpr int kPanels = 3;

}  // namespace monoidreduce
