"""Experiments: data sets, models and one file for each claim that is tested."""
