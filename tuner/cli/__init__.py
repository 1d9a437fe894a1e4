"""The `tuner` command."""
