"""The code that all operator families share: calls, launches, configs, random states."""
