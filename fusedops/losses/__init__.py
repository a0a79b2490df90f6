"""A family: row-wise losses of matrix products, computed in chunks of rows."""
