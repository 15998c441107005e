"""Peak memory of the prefill of a long prompt.

    python benchmarks/memory.py CKPT --context 32768

Prints the process's peak resident memory, what of it is the host store, and the rest: the model, one layer's
keys and values, activations in blocks, and what JAX itself takes.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np

import rajax
from rajax.bench import load
from rajax.session import Session, prefill


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=8, help="tokens to decode after it")
    args = parser.parse_args()

    total = args.context + args.new
    model = load(args.checkpoint, total)
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, args.context).astype(np.int32)

    start = time.perf_counter()
    with Session(model, [args.context], [total], rajax.RetrievalConfig(exact_below=0)) as session:

        def report(done: int, layers: int) -> None:
            print(f"\rlayer {done} of {layers}, {time.perf_counter() - start:.0f} s", end="", flush=True)

        token = prefill(model, [prompt], [session], report).argmax(-1)
        waited = session.finish_prefill()
        prefilled = time.perf_counter() - start
        steps = []
        for _ in range(args.new):
            begin = time.perf_counter()
            token = np.asarray(session.step(token)).argmax(-1)
            steps.append(time.perf_counter() - begin)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert session.store is not None
        store = session.store.kv_bytes + session.store.index_bytes
        rows = {
            "prefill": f"{prefilled:.0f} s, of which {waited:.0f} s only waiting for indexes",
            "decode, median step": f"{1e3 * float(np.median(steps[1:])):.0f} ms",
            "KV on the device": f"{session.device_bytes / 2**20:.0f} MiB",
            "host store": f"{store / 2**30:.2f} GiB, keys, values and index",
            "peak resident memory": f"{peak / 2**30:.2f} GiB",
            "besides the host store": f"{(peak - store) / 2**30:.2f} GiB",
        }
    print()
    for name, value in rows.items():
        print(f"{name:<24}{value}")


if __name__ == "__main__":
    main()
