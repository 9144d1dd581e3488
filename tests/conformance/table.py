"""docs/models.md, from a run of every model.

python -m tests.conformance.table > docs/models.md
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib.metadata import version

from mlx_lm.utils import MODEL_REMAPPING

from kvkeep.prefixstore.recipe import read_caches
from tests.conformance import models
from tests.conformance.configs import EMPTY_CACHES, METAL_ONLY, NOT_CAUSAL, UNRUNNABLE

SYMBOLS = {
    "D": ("head_dim", "kv_channels", "hidden_size_per_head"),
    "G": ("global_head_dim",),
    "I": ("index_head_dim",),
    "L": ("kv_lora_rank",),
    "R": ("qk_rope_head_dim",),
    "V": ("v_head_dim",),
}
"""Widths of a head by the fields of a configuration."""

HEADS = {
    "H": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"),
    "A": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
}

SPELLED_ELSEWHERE = {"dbrx": {"H": 2}, "nemotron-nas": {"H": 2}, "plamo": {"H": 2}}
"""Sizes that a configuration has in a nested field or as a quotient."""

PAGE = """\
# Models

Every model of mlx-lm {version} that runs on a CPU was run with a tiny configuration: a prompt in
chunks, an answer, a second prompt and its answer, with snapshots on the way. In a store that
was opened anew, the prompt was resumed at every offset at which that is exact, and went on bit
for bit like the run that never stopped; every other offset was refused with its reason.
`make test` repeats all of this, and fails when mlx-lm brings a model that is not listed here, or
when a line changes.
`python -m tests.conformance.table` writes this page.

**Caches**: what the model's `make_cache` builds, for as many layers as the tiny configuration
has. The kinds are those of [policy.md](policy.md). How many of each a real model has, and in many
cases whether a layer has a sliding window at all, is up to its own configuration.

**Resumes**: *anywhere*: at any offset of a stored prompt. *In stored windows*: at every resume
point, and wherever the rows that the windows read were stored with one. *At resume points*: only
where a snapshot was taken. [policy.md](policy.md) has the rules.

**Elements**: what one more token adds to one cache of each kind, in the order of the kinds; in
bfloat16, 2 bytes each. `arrays` and `kv-compressed` add nothing, but are stored whole at each
resume point. `H` key/value heads, `A` attention heads, `D` head size, `G` head size of a layer
without a window, `L` `kv_lora_rank`, `R` `qk_rope_head_dim`, `N` `qk_nope_head_dim`,
`V` `v_head_dim`, `I` `index_head_dim`.

| model | layers | caches | resumes | elements |
|---|---|---|---|---|
{rows}

mlx-lm loads these model types as another one: {aliases}.

## Models that need care

| model | why |
|---|---|
{care}

## Models that were not run

| model | why |
|---|---|
{unrun}
"""


def row(name, live):
    """The line of ``name``, whose caches were filled by a run."""
    recipe = read_caches(live.caches, len(live.tokens)).recipe
    kinds = Counter(recipe.kinds)
    caches = ", ".join(f"`{kind}`" + (f" ×{n}" if n > 1 else "") for kind, n in kinds.items())
    sizes = models.config(name)
    sizes = {**sizes, **sizes.get("text_config", {})}
    elements = dict.fromkeys(_elements(name, sizes, x) for x in recipe.layers if x.rows)
    cells = (f"`{name}`", len(live.model.layers), caches, _resumes(recipe), ", ".join(elements))
    return f"| {' | '.join(str(cell or '–') for cell in cells)} |"


def document(mlx_lm, rows):
    """The page with these lines."""
    return PAGE.format(
        version=mlx_lm,
        rows="\n".join(rows),
        aliases=", ".join(f"`{a}` as `{b}`" for a, b in sorted(MODEL_REMAPPING.items())),
        care=_reasons({**NOT_CAUSAL, **EMPTY_CACHES}),
        unrun=_reasons({**METAL_ONLY, **UNRUNNABLE}),
    )


def _reasons(table):
    return "\n".join(f"| `{name}` | {why} |" for name, why in table.items())


def _resumes(recipe):
    if any(layer.reach.stateful for layer in recipe.layers):
        return "at resume points"
    if any(layer.reach.window is not None for layer in recipe.layers):
        return "in stored windows"
    return "anywhere"


def _elements(name, sizes, layer):
    """What one token adds to this cache, such as ``2·H·D``."""
    parts = []
    for spec in layer.rows:
        _, heads, _, width = spec.shape
        if width:
            factors = (_heads(name, sizes, heads), _width(sizes, width))
            parts.append("·".join(x for x in factors if x))
    if len(parts) == 2 and parts[0] == parts[1]:
        return f"2·{parts[0]}"
    return " + ".join(parts)


def _heads(name, sizes, heads):
    if heads == 1:
        return ""
    for symbol, fields in HEADS.items():
        found = [sizes.get(field) for field in fields]
        found.append(SPELLED_ELSEWHERE.get(name, {}).get(symbol))
        if any(heads == x or (isinstance(x, list) and heads in x) for x in found):
            return symbol
    raise LookupError(f"{name} has caches of {heads} heads; which field says so?")


def _width(sizes, width):
    for symbol, fields in SYMBOLS.items():
        if width in [sizes.get(field) for field in fields]:
            return symbol
    if width == sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0):
        return "(N + R)"
    return "D"


def main():
    from tests.conformance.live import run, tokens_of

    names = [name for name in models.names() if name not in {**METAL_ONLY, **UNRUNNABLE}]
    rows = [row(name, run(models.build(name), tokens_of(name))) for name in names]
    sys.stdout.write(document(version("mlx-lm"), rows))


if __name__ == "__main__":
    main()
