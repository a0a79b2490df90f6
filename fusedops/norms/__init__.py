"""The norm family: LayerNorm, RMSNorm, and their fusion with bias, dropout and residual."""
