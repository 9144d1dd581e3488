"""Programs that measure kvkeep beside ``mlx_lm``'s own prompt caches: ``python -m benchmarks``."""
