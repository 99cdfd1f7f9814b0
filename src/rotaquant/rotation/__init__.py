"""What is exact: fold norms, fuse rotations in float64, prove that nothing changed."""
