"""Before the GPU is there: an artifact's kernels through the compiler of its driver. Imports no JAX of its own."""
