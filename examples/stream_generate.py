"""Answer a prompt with plain ``mlx_lm.stream_generate``, and keep what was read.

    python examples/stream_generate.py --model MODEL --prompt "Tell me about tides."

Run it twice, or with a longer prompt that begins the same way: the second run resumes, also
for models with recurrent layers or sliding windows.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from mlx_lm import load, stream_generate

import kvkeep


def main() -> None:
    """Load the model, resume what is stored of the prompt, answer, store the rest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub id of an mlx-lm model")
    parser.add_argument("--prompt", required=True, help="the user's message")
    folder = os.environ.get("KVKEEP_STORE", "~/.cache/kvkeep")
    parser.add_argument("--store", default=folder, help=f"folder of the store (default: {folder})")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    loaded: Any = load(args.model)
    model, tokenizer = loaded[:2]
    message = {"role": "user", "content": args.prompt}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)

    with kvkeep.open(args.store) as store:
        space = store.space(model=model, tokenizer=tokenizer, model_path=args.model)
        with kvkeep.session(space, prompt, model) as s:
            for response in stream_generate(
                model,
                tokenizer,
                s.rest,
                max_tokens=args.max_tokens,
                prompt_cache=s.caches,
                prompt_progress_callback=s.progress,
            ):
                s.emitted(response.token)
                print(response.text, end="", flush=True)
        print()
        print(s.decision, file=sys.stderr)


if __name__ == "__main__":
    main()
