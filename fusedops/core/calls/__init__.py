"""The call of an operator: cache, choice of path, derivatives, registration."""
