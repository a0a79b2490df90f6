"""Times the regions of models both ways: as an operator of this package, and by torch.compile."""
