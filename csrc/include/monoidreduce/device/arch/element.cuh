// The 16-bit element types, by name alone: cuda_bf16.h and cuda_fp16.h say what they are, where that matters.
#pragma once

struct __half;
struct __nv_bfloat16;
