"""Measures the theory of delayed gradients on problems whose optimum is known."""
