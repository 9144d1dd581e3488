"""Rows and state ⇄ bytes: frames, compression, checksums, the LMDB environment, portable files."""
