"""Tuned libraries: packaging, the C runtime, and loading them from Python."""
