"""The store: spaces, trie, resume points, the reuse policy, eviction, write-behind, events."""
