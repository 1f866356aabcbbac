// Forward declarations of the 16-bit element types. Code that needs their definitions includes cuda_bf16.h
// and cuda_fp16.h.
#pragma once

struct __half;
struct __nv_bfloat16;
