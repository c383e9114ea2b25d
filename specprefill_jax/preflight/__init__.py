"""Before the GPU is there: an artifact's kernels through the compiler of that GPU's driver."""
