"""What every operator family stands on."""
