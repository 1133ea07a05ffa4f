"""Tests of snapshots in host memory."""
