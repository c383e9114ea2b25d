"""The steps of scripts/gpu_check: each builds what it needs on any machine, and checks it on a GPU."""
