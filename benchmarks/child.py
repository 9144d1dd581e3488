"""One step of a measurement in a process of its own: what ``Bench.step`` starts.

``python -m benchmarks.child MODULE FUNCTION ARGUMENTS`` calls the function with the JSON
arguments and prints the mapping that it returns as the last line.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys


def main() -> None:
    """Run the step that the command line names."""
    module, function, arguments = sys.argv[1:]
    answer = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    unit = 1 if sys.platform == "darwin" else 1024
    answer.setdefault("peak_rss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    print()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
