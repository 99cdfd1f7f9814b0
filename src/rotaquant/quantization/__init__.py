"""What is lossy: grids, clip search and GPTQ; tensors in, tensors out."""
