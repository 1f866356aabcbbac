// The instructions of the CPU engine's interpreter (cpu/program.h). Python writes programs of them (folds/cpu/bytecode.py):
// it takes names and limits from here.
#pragma once

namespace monoidreduce {

enum class Instruction {
  // to = the element's scores; number a of the column's data, of a word or an integer of 64 bits; the column's number
  kScore,
  kOther,
  kColumn,
  kWideColumn,
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
  // of integers of a word, which neither leave it nor divide by 0 otherwise than floor_of_quotient does
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
  kWithin,  // the index that is nearest to a in an axis of b, where negative ones count from the end
  // of integers of 64 bits, which wrap. kWiden: of one of a word; kWideWithin: b and the result are of a word
  kWiden,
  kWideToReal,
  kWideAdd,
  kWideSub,
  kWideMul,
  kWideDiv,
  kWideMod,
  kWideLt,
  kWideLe,
  kWideEq,
  kWideWhere,
  kWideWithin,
  // to = element a of the call's table of reals, of integers that fit a word, of any; b: is a the same for all rows
  kGather,
  kIndexGather,
  kWideGather,
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
    "score",        "other",    "column",     "wide_column", "position",    "neg",          "abs",
    "exp",          "expm1",    "log",        "log1p",       "log1pexp",    "sqrt",         "sin",
    "cos",          "atan",     "floor",      "round",       "tanh",        "erf",          "sigmoid",
    "add",          "sub",      "mul",        "div",         "pow",         "fmod",         "maximum",
    "minimum",      "share",    "where",      "lt",          "le",          "eq",           "and",
    "or",           "not",      "to_real",    "index_add",   "index_sub",   "index_mul",    "index_div",
    "index_mod",    "index_lt", "index_le",   "index_eq",    "index_where", "within",       "widen",
    "wide_to_real", "wide_add", "wide_sub",   "wide_mul",    "wide_div",    "wide_mod",     "wide_lt",
    "wide_le",      "wide_eq",  "wide_where", "wide_within", "gather",      "index_gather", "wide_gather",
    "frame",        "weight",   "mean",       "total",       "largest",     "count",        "result",
    "store"};
static_assert(sizeof(kInstructionNames) / sizeof(char*) == static_cast<int>(Instruction::kStore) + 1);

// Registers of a block of columns come first, then registers of a row. A program may have fewer, and touches no others.
inline constexpr int kBlockRegisters = 128, kRowRegisters = 512, kStateFields = 32;
// Of the code of a row, and of that of an element.
inline constexpr int kMostSteps = 1 << 14;
// Panels of numbers of elements. The panels of the two scores come first.
inline constexpr int kPanels = 3;

}  // namespace monoidreduce
