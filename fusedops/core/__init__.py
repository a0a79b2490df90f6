"""The modules that all operator families use: calls, launches, tuning, random state, DTensors."""
