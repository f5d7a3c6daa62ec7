"""The fused CPU kernels: native code for several instruction sets, and the Python that packs a network for them."""
