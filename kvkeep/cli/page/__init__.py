"""A report as one page of HTML that needs nothing else: no server, no network.

``collect`` gathers what the charts show while the events are read, ``figures`` turns it into
figures for plotly.js, ``tables`` writes the same numbers as text, ``write`` puts all of it into
one file. ``page.css`` and ``page.js`` go in as they are.
"""
