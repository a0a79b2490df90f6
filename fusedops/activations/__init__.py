"""The activation family: activations with a bias and dropout, and gated units."""
