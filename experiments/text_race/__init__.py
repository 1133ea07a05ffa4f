"""Races ways to train on text, on emulated hosts with slow links."""
