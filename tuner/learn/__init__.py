"""Search: cost models, samplers and strategies."""
