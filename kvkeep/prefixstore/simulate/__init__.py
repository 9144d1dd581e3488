"""Replaying recorded requests against a store of any size, without a model and without a disk.

``traces`` reads the requests, ``trie`` is the store in memory, ``replay`` counts. Which node
goes is decided by ``kvkeep.prefixstore.eviction``, the code that runs in a store.
"""
