"""Horizontal fusion: any row-wise function of many slices, in one launch each way."""
