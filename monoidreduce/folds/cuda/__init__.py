"""Programs as GPU kernels: C++ text, compilation by NVRTC with a disk cache, and the passes that launch."""
