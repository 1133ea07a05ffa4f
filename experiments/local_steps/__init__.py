"""Measures local steps: time on slow links, and what they cost in accuracy."""
