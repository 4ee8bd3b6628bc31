"""Where arrays live and are computed on: the protocol, NumPy, native code for CPUs, CUDA."""
