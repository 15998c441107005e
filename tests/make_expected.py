"""Computes the logits that the parity tests expect: `python tests/make_expected.py`.

Needs the `parity` extra; what it writes to tests/data is kept in the repository, so that the tests that read
it need neither torch nor transformers. The logits are those of transformers in float32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import tokenizers
import torch
import transformers

from rajax import smollm2

DATA = Path(__file__).parent / "data"
TOKENS, POSITIONS, COLUMNS = 512, 48, 256
"""What is kept of the demo model's logits: all of them would be 100 MB."""


def load(hf_dir: Path) -> Any:
    """transformers' model of a directory, in float32 and with attention written out as in the paper."""
    # Typed as Any: the model's own types say nothing about logits.
    transformers.utils.logging.disable_progress_bar()
    loader: Any = transformers.LlamaForCausalLM
    return loader.from_pretrained(hf_dir, dtype=torch.float32, attn_implementation="eager").eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits [T, V] of one pass over a text."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].numpy()


def write_smollm2_hf_directory(work: Path) -> Path:
    """The demo model as a Hugging Face directory in `work`."""
    hf_dir = work / "smollm2"
    smollm2.write_hf_directory(smollm2.download(work), hf_dir)
    return hf_dir


def sample(tokens: np.ndarray, full: np.ndarray) -> dict[str, np.ndarray]:
    """What is kept of the demo model's logits [T, V]."""
    random = np.random.RandomState(0)
    positions = np.sort(random.choice(len(full), POSITIONS, replace=False)).astype(np.int32)
    columns = np.sort(random.choice(full.shape[1], COLUMNS, replace=False)).astype(np.int32)
    top = full.max(-1)
    sums = np.exp((full - top[:, None]).astype(np.float64)).sum(-1)
    return {
        "tokens": tokens,
        "argmax": full.argmax(-1).astype(np.int32),
        "top": top,
        "logsumexp": (top + np.log(sums)).astype(np.float32),
        "positions": positions,
        "columns": columns,
        "logits": full[np.ix_(positions, columns)],
    }


def main() -> None:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        expected = {}
        for name in tiny.CONFIGS:
            tiny.write_hf_directory(name, work / name)
            expected[name] = logits(load(work / name), tiny.text(name))
        np.savez_compressed(DATA / "tiny_logits.npz", **expected)

        hf_dir = write_smollm2_hf_directory(work)
        tokenizer = tokenizers.Tokenizer.from_file(str(hf_dir / "tokenizer.json"))
        ids = tokenizer.encode((DATA / "prose.txt").read_text(encoding="utf-8")).ids
        if len(ids) < TOKENS:
            raise SystemExit(f"prose.txt has {len(ids)} tokens, {TOKENS} are needed")
        tokens = np.asarray(ids[:TOKENS], np.int32)
        np.savez_compressed(DATA / "smollm2_logits.npz", **sample(tokens, logits(load(hf_dir), tokens)))
    for file in sorted(DATA.glob("*_logits.npz")):
        print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
