"""Hostile bytes for every decoder: found by a coverage-guided fuzzer, kept as cases."""
