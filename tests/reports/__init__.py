"""Events and what is made of them: reports, pages, metrics."""
