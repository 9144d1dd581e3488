"""Caches that mlx-lm lacks, and the contract that all caches satisfy; docs/caches.md.

Importing this package imports neither mlx nor mlx-lm.
"""
