"""Other stores of prompt caches, driven in their own Pythons beside kvkeep.

Each ``peer_*.py`` here is one adapter; ``program.py`` runs it. No file of this folder imports
kvkeep, and none imports a peer before it runs in that peer's environment.
"""
