"""What all operator families share: calls, launches, configs, random states."""
