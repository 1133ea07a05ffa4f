"""Runs jobs that lose a process, a link or a disk, and end with the same bits."""
