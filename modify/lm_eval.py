"""lm-eval's own command line, which then knows converted checkpoints.

    python -m modify.lm_eval --model hf --model_args pretrained=SmolLM2-mod --tasks ..

lm-eval loads a model by transformers' Auto classes, which know converted checkpoints once modify has been imported, as
it is here; there is no remote code to trust. `accelerate launch -m modify.lm_eval ..` works likewise.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run lm-eval with the arguments of this process; exit with 2 where it is not installed."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        sys.stderr.write("error: lm-eval is not installed; run: pip install lm-eval\n")
        raise SystemExit(2) from None
    sys.argv[0] = "lm_eval"
    cli_evaluate()


if __name__ == "__main__":
    main()
