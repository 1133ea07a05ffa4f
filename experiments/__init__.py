"""Experiments: data sets, models, and one program for each claim that is tested."""
