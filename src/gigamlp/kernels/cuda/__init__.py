"""The fused CUDA kernel: its source, what specialises it to a network, and what compiles, keeps and launches it."""
