"""The choice of a kernel's config."""
