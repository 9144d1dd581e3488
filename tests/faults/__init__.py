"""Faults on purpose: killed processes, damaged files, full disks, and many processes at once."""
