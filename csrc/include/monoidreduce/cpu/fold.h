// The CPU engine: fold_forward and fold_backward for any monoid, from the same structs as the GPU kernels.
// Header-only.
//
// One lane is one row. kPanel rows side by side make a panel, and every intermediate is a panel:
// [width][kPanel] for the rows themselves, [columns][kPanel] for a tile of scores, [payload width][kPanel]
// for the output. So the fold is vertical (no horizontal maximum or sum), and the products need no
// transposition between them (a is broadcast, b and c are panels):
//
//   forward    scores   [columns][rows]   = b  [columns, width]            x a panel
//              out      [payload][rows]  += payload^T [payload, columns]   x weights panel
//   backward   scores, and u [columns][rows] = payload [columns, payload]  x grad_out panel
//              d_a      [width][rows]    += b^T                            x dz panel
//              d_b      [columns][width] += dz [columns, rows]             x a   (lanes are widths here)
//              d_payload[columns][payload] += weights [columns, rows]      x grad_out
//
// Nothing of size rows x columns exists: forward holds one tile a thread, backward a block of columns by a
// chunk of rows. Results do not depend on which thread does what: every sum has a fixed order.
#pragma once

#include "monoidreduce/cpu/fold_backward.h"
#include "monoidreduce/cpu/fold_forward.h"
