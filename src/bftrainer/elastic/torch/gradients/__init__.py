"""Gradient package: sums gradients over all ranks during the backward pass, and applies them."""
