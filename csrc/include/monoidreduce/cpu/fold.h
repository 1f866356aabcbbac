// The CPU engine: fold_forward and fold_backward for any monoid, with the same structs as the GPU kernels. Header-only.
//
// One SIMD lane is one row. kPanel rows side by side make a panel, and every intermediate is a panel: the rows are
// [width][kPanel], a tile of scores is [columns][kPanel], the output is [payload width][kPanel]. So the fold needs no
// horizontal maximum or sum. No matrix product needs its operands transposed either: of c = a b, a is broadcast, b and c are
// panels (matmul.h).
//
//   forward    scores   [columns][rows]   = b  [columns, width]            x a panel
//              out      [payload][rows]  += payload^T [payload, columns]   x weights panel
//   backward   scores, and u [columns][rows] = payload [columns, payload]  x grad_out panel
//              d_a      [width][rows]    += b^T                            x dz panel
//              d_b      [columns][width] += dz [columns, rows]             x a   (lanes are elements of the width here)
//              d_payload[columns][payload] += weights [columns, rows]      x grad_out
//
// dz is the derivative of the loss with respect to the dot products, and u = <grad_out, payload>. No matrix of rows x columns
// is stored: forward holds one tile per thread, backward a block of columns by a chunk of rows. Every sum has a fixed order,
// so results do not depend on how threads share the work.
#pragma once

#include "monoidreduce/cpu/fold_backward.h"
#include "monoidreduce/cpu/fold_forward.h"
