"""Kernels: native code that engines launch, and the Python that specialises it."""
