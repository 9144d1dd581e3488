"""Who may see what is stored, and that it is gone when it should be."""
