// The instructions of the CPU engine's interpreter (cpu/program.h). Python writes the programs (folds/cpu/bytecode.py), and
// takes names and limits from here.
//
// An instruction has the operands to, a, b and c: numbers of registers, unless said otherwise. A word is as wide as the real
// type. So an integer of a word has 32 bits beside float, 64 beside double; wide integers always have 64.
#pragma once

namespace monoidreduce {

enum class Instruction {
  kScore,       // to = the element's first score
  kOther,       // to = the element's second score
  kColumn,      // to = the a-th datum of the column, a word
  kWideColumn,  // to = the a-th datum of the column, a wide integer
  kPosition,    // to = the index of the column
  // to = f(a), f(a, b) or f(a, b, c), of reals
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
  // The same of masks
  kAnd,
  kOr,
  kNot,
  // The same of integers of a word. Python writes only programs in which they do not overflow. Division by 0 is as in
  // floor_of_quotient.
  kToReal,
  kIndexAdd,
  kIndexSub,
  kIndexMul,
  kIndexDiv,
  kIndexMod,
  kIndexAnd,  // of bits, as the next one
  kIndexOr,
  kIndexLt,
  kIndexLe,
  kIndexEq,
  kIndexWhere,
  kWithin,  // a as an index into an axis of size b: negative ones count from the end; clamped
  // The same of wide integers, which wrap on overflow. kWiden converts from a word. In kWideWithin, b and the result are words.
  kWiden,
  kWideToReal,
  kWideAdd,
  kWideSub,
  kWideMul,
  kWideDiv,
  kWideMod,
  kWideAnd,
  kWideOr,
  kWideLt,
  kWideLe,
  kWideEq,
  kWideWhere,
  kWideWithin,
  kWideStream,  // to = the stream of random numbers (random.h) of seed a and leading indices b, wide integers
  // to = the random number (random.h) of stream a, a wide integer, in row b and column c, integers of a word
  kWideUniform,
  kWideUniform16,
  // to = element a of the call's table of reals, of integers that fit a word, or of wide integers. b is not a register: 1 if
  // a is the same for all rows.
  kGather,
  kIndexGather,
  kWideGather,
  // These update the row's state; `to` is a field of the state
  kFrame,  // raises the frame (row max) to the log weights a, and rescales the b fields that follow it. c is the field of
           // the entropy's sum, which moves with it; 0 if there is none
  kWeight,   // `to` is a register: to = exp(a - frame), which is added to the mass; b is the frame's field
  kMean,     // += a b, weight times value, where the log weight c is not -inf
  kEntropy,  // += a times its logarithm b - frame; c is the frame's field
  kTotal,    // += a
  kLargest,  // the largest a, and its column in the next field. Field c gets the b of that column; 0: none does
  kCount,    // += 1 where the mask a is true
  // These write a number of the element into panel `to`
  kResult,  // a times the scale of scores
  kStore,   // a
};
inline constexpr const char* kInstructionNames[] = {
    "score", "other", "column", "wide_column", "position",
    // of reals
    "neg", "abs", "exp", "expm1", "log", "log1p", "log1pexp", "sqrt", "sin", "cos", "atan", "floor", "round",
    "tanh", "erf", "sigmoid", "add", "sub", "mul", "div", "pow", "fmod", "maximum", "minimum", "share",
    "where", "lt", "le", "eq",
    // of masks
    "and", "or", "not",
    // of integers of a word
    "to_real", "index_add", "index_sub", "index_mul", "index_div", "index_mod", "index_and", "index_or",
    "index_lt", "index_le", "index_eq", "index_where", "within",
    // of wide integers
    "widen", "wide_to_real", "wide_add", "wide_sub", "wide_mul", "wide_div", "wide_mod", "wide_and",
    "wide_or", "wide_lt", "wide_le", "wide_eq", "wide_where", "wide_within", "wide_stream", "wide_uniform",
    "wide_uniform_16",
    // of tables
    "gather", "index_gather", "wide_gather",
    // of the row's state
    "frame", "weight", "mean", "entropy", "total", "largest", "count",
    // of panels
    "result", "store"};
static_assert(sizeof(kInstructionNames) / sizeof(char*) == static_cast<int>(Instruction::kStore) + 1);

// Limits. Registers of a block of columns have the numbers from 0 on, registers of a row the numbers after these.
inline constexpr int kBlockRegisters = 128, kRowRegisters = 512, kStateFields = 32;
// The most instructions in the code of a row, and in the code of an element.
inline constexpr int kMostSteps = 1 << 14;
// Panels that hold a number for each element. Those of the two scores come first.
inline constexpr int kPanels = 4;

}  // namespace monoidreduce
