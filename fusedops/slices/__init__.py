"""The slices family: LayerNorm and an activation on many slices of features at once."""
