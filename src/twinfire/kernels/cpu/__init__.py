"""The native op set for CPUs: C++ kernels without torch, one extension module `_native`.

`native_weights` packs weights, `recorder` turns one run of a model into a program, which
`_native` replays for every step on its own threads. Sources lie in `csrc/`: kernels are written
over `simd.h` and compiled once per instruction set.
"""
