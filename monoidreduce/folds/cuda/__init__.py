"""Programs as kernels for a GPU: their C++ text, compiled by NVRTC and kept on disk, and their passes."""
