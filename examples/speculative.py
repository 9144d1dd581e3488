"""Speculative decoding with any two models of mlx-lm, recurrent ones too.

mlx-lm refuses a draft model where a cache cannot be trimmed. ``kvkeep.caches.rounds`` takes such
caches back to any token of a window, so a hybrid target (Qwen3-Next, Qwen3.5) can have a draft, and
the draft may be a hybrid itself::

    python examples/speculative.py                                  # a tiny random pair
    python examples/speculative.py --target MODEL --draft MODEL --prompt "Tell me about tides."

Both models must have one vocabulary. The table shows what each round accepted; the last line says
whether the output is that of the target alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.caches.rounds import Rounds

TINY = {
    "model_type": "qwen3_next",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
}
TINY_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


class Round(NamedTuple):
    """What one forward of the target decided: tokens drafted, accepted, and those to emit."""

    drafted: int
    accepted: int
    tokens: list[int]


def main() -> None:
    """Generate with a draft model, then without, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", help="folder or hub id of the model that decides")
    parser.add_argument("--draft", help="folder or hub id of the model that proposes")
    parser.add_argument("--prompt", default="Tell me about tides.", help="the user's message")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=4, help="proposed in each round")
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    if args.max_tokens < 1 or args.draft_tokens < 1:
        parser.error("--max-tokens and --draft-tokens are at least 1")

    tokenizer = None
    if args.target is None:
        target, draft, prompt = tiny(noise=0.0), tiny(noise=0.03), TINY_PROMPT
    else:
        loaded: Any = load(args.target)
        target, tokenizer = loaded[:2]
        draft = load(args.draft)[0]
        message = {"role": "user", "content": args.prompt}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)

    print(f"{'round':>5} {'drafted':>8} {'accepted':>9}")
    output: list[int] = []
    rounds = drafted = accepted = 0
    for done in speculative(target, draft, prompt, args.max_tokens, args.draft_tokens):
        rounds, drafted, accepted = rounds + 1, drafted + done.drafted, accepted + done.accepted
        output += done.tokens
        print(f"{rounds:>5} {done.drafted:>8} {done.accepted:>9}")
    alone = list(plain(target, prompt, args.max_tokens))
    if tokenizer is not None:
        print(tokenizer.decode(output))
    print(f"accepted {accepted} of {drafted} drafted tokens ({accepted / drafted:.0%})")
    print(f"{len(output)} tokens in {rounds} forwards of the target, {len(alone)} without a draft")
    same = next((i for i, (a, b) in enumerate(zip(output, alone, strict=True)) if a != b), None)
    # A forward over several tokens may round two equal logits the other way.
    print(f"same as the target alone: {'yes' if same is None else f'no, from token {same + 1} on'}")


def speculative(
    target: Any, draft: Any, prompt: Sequence[int], count: int, width: int
) -> Iterator[Round]:
    """Rounds of greedy speculative decoding, until ``count`` tokens are out.

    Each round drafts up to ``width`` tokens, and emits those that the target accepts and one
    that it chooses itself.
    """
    caches, drafts = make_prompt_cache(target), make_prompt_cache(draft)
    read(target, caches, prompt[:-1])
    read(draft, drafts, prompt[:-1])
    # What the draft has not read ends with the one token that the target has not.
    unread = list(prompt[-1:])
    left = count
    with Rounds(target, caches) as deciding, Rounds(draft, drafts) as proposing:
        while left:
            proposing.begin()
            proposed: list[int] = []
            fed = unread
            for _ in range(min(width, left - 1) or 1):
                proposed += choices(draft, drafts, fed)[-1:]
                fed = proposed[-1:]

            deciding.begin()
            chosen = choices(target, caches, [*unread[-1:], *proposed])
            accepted = 0
            while accepted < len(proposed) and proposed[accepted] == chosen[accepted]:
                accepted += 1

            deciding.rollback(1 + accepted)
            # The last proposal was never fed to the draft.
            proposing.rollback(len(unread) + min(accepted, len(proposed) - 1))
            tokens = chosen[: accepted + 1][:left]
            behind = int(accepted == len(proposed))
            unread = chosen[accepted - behind : accepted + 1]
            left -= len(tokens)
            yield Round(len(proposed), accepted, tokens)


def plain(model: Any, prompt: Sequence[int], count: int) -> Iterator[int]:
    """Greedy decoding of the model alone, one token a forward."""
    caches = make_prompt_cache(model)
    read(model, caches, prompt[:-1])
    token = prompt[-1]
    for _ in range(count):
        token = choices(model, caches, [token])[-1]
        yield token


def read(model: Any, caches: list[Any], tokens: Sequence[int], step: int = 512) -> None:
    """Prefill ``tokens``."""
    for start in range(0, len(tokens), step):
        model(mx.array(list(tokens[start : start + step]))[None], cache=caches)
        mx.eval([cache.state for cache in caches])


def choices(model: Any, caches: list[Any], tokens: Sequence[int]) -> list[int]:
    """The likeliest token after each of ``tokens``."""
    logits = model(mx.array(list(tokens))[None], cache=caches)
    found: Any = mx.argmax(logits[0], axis=-1).tolist()
    return list(found)


def tiny(noise: float) -> Any:
    """A random hybrid model, the same each time up to the ``noise`` on its weights."""
    mx.random.seed(7)
    module: Any = qwen3_next
    model = module.Model(module.ModelArgs.from_dict(TINY))
    model.update(
        tree_map(lambda x: x + noise * mx.std(x) * mx.random.normal(x.shape), model.parameters())
    )
    mx.eval(model.parameters())
    return model


if __name__ == "__main__":
    main()
