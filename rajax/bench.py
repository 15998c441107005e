"""`rajax bench`: prefill and decode at several depths, dense attention beside retrieval, in the manner of llama-bench.

At each depth the first tokens of a text are prefilled **once**. The keys go to the host, and every attention is given
them from there. Then the attentions take turns through the tokens that follow, the same for all (teacher forcing): a
step of the one, a step of the next, so that all times are of the same minutes. The first steps compile and do not
count.

What a row says:

- `pp`, prefill: seconds of the model alone, once, without compilation; for an attention that indexes, the time that
  this takes is added, and is also told apart (`index_s`). In `rajax generate` a part of it hides behind the prefill.
- `tg`, decode: the median step, and half the interquartile range as its spread.
- KL(dense || attention) of the next token's distribution in nats, mean over the same steps; null without dense.
- bytes of keys, values and index on the device and on the host, after the last step.

Where a step's time goes (`stages`, ms per token):

- `host_search`, `host_attention`: timers on the host path, mean over the steps. The host works beside the device, so
  what overlaps counts in both.
- `device_kernel`, `merge`: the kernel over the session's own cache, and the merge of partials, of all layers, each as
  a jitted program of its own, one layer after the other; median of some runs.
- `callback`: the callbacks of all layers as a jitted program of their own with nothing behind them. ScaNN's host path
  is used itself, two callbacks a layer, with a request that is not there; for clusters one callback a layer of the kind
  that they use, with a partial for an answer.
- `rest`: the whole less these: weights, norms, the logits, what runs on the device for clusters, handing a search to
  its thread. It is smaller by what overlaps.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` key positions, `H` head dim,
`V` vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax import checkpoint as checkpoints
from rajax import report
from rajax.cli import format_bytes
from rajax.haystack import manual
from rajax.host_path import CallbackHostPath
from rajax.interrupt import interrupt
from rajax.kernels import Partial, finish, merge, no_keys, partial_attention
from rajax.kernels.host_call import CORES, filled_by_host
from rajax.models import DeviceCache, Llama, LlamaConfig, Zone
from rajax.peers import Peer, PeerMaker, peer_makers
from rajax.retrieval import RetrievalConfig, parse_attentions
from rajax.session import OnPrefill, Session, prefill
from rajax.tokenizer import load_tokenizer

TURN = 8
"""Steps that an attention takes before it is the next one's turn. In use, too, a step finds in the caches what the one
before it left."""

WARM_UP = 4
"""Steps that compile, and do not count."""

RUNS = 9
"""Runs of a stage that is timed alone."""

STAGES = "device_kernel", "host_search", "host_attention", "callback", "merge", "rest"

NOBODY = np.int32(-1)
"""A handle that no request has: its callbacks find nothing to do."""

TINY = 1e-30
"""What one layer's result adds to the next one's query, where layers are timed alone: XLA cannot know that it is
nothing, and must keep their order."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
      checkpoint: the model's.
      depths: tokens before the steps.
      prompts: further lengths, of which only the prefill is measured.
      attentions: by name, as `retrieval.parse_attentions` reads them; None is dense attention.
      steps: decode steps that count, per depth and attention.
      text: a text file; None takes `haystack.manual`.
      rope_scaling: Hugging Face's; None is YaRN where a depth needs it.
      dtype, prefill_precision: as in `rajax.load`.
      peers: whether llama.cpp and transformers run as well.
      gguf: the model for llama.cpp; None knows the demo model's.
    """

    checkpoint: Path
    depths: Sequence[int]
    prompts: Sequence[int] = ()
    attentions: Mapping[str, RetrievalConfig | None] = dataclasses.field(
        default_factory=lambda: parse_attentions("dense,scann,wave")
    )
    steps: int = 64
    text: Path | None = None
    rope_scaling: Mapping[str, Any] | None = None
    dtype: str | None = None
    prefill_precision: str = "float32"
    peers: bool = False
    gguf: Path | None = None

    def __post_init__(self):
        if not self.attentions:
            raise ValueError("no attention to measure")
        for size in (*self.depths, *self.prompts):
            if size < 1:
                raise ValueError(f"a depth must be at least 1 token, found {size}")
        if not self.depths and not self.prompts:
            raise ValueError("no depth to measure")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, found {self.steps}")

    @property
    def needed(self) -> int:
        """Tokens that the text must have."""
        deepest = max(self.depths) + WARM_UP + self.steps if self.depths else 0
        return max(deepest, *self.prompts, 0)


def run(
    request: Request, say: Callable[[str], None], progress: Callable[[str, str], Any]
) -> Iterator[list[Row]]:
    """Measures; yields the rows of one length after the other.

    Args:
      request: what.
      say: told what happens, a line at a time.
      progress: makes a context manager of a function of (done, total), from what is done and its unit.

    Raises:
      ValueError: the text is too short, or a depth lies past the positions of `request.rope_scaling`.
      Whatever loading a checkpoint raises.
    """
    config = checkpoints.read_config(request.checkpoint)
    tokens = _text_tokens(request)
    sizes = sorted({*request.depths, *request.prompts})
    scalings = {size: _scaling(request, config, size) for size in sizes}
    makers = peer_makers(request.checkpoint, request.gguf, say) if request.peers else {}
    model, scaling = None, None
    for size in sizes:
        if model is None or scalings[size] != scaling:
            scaling = scalings[size]
            model = checkpoints.load(
                request.checkpoint,
                dtype=request.dtype,
                rope_scaling=scaling,
                prefill_precision=request.prefill_precision,
            )
        if scaling is not None and request.rope_scaling is None:
            say(
                f"{size} tokens are more than the model's {config.max_positions} positions: YaRN with factor "
                f"{scaling['factor']:g}"
            )
        steps = request.steps + WARM_UP if size in request.depths else 0
        rows = _measure(
            model, request.attentions, makers, scaling, tokens[: size + steps], size, say, progress
        )
        common = {
            "model": request.checkpoint.absolute().name,
            "dtype": str(model.embed_tokens.embedding[...].dtype),
            "prefill_precision": model.prefill_precision,
            "rope_scaling": scaling and dict(scaling),
            "device": jax.devices()[0].device_kind,
            "threads": CORES,
        }
        yield [row | common for row in rows]


def yarn(config: LlamaConfig, length: int) -> dict[str, Any] | None:
    """YaRN with the smallest whole factor that a text of so many tokens needs; None where it needs none."""
    if length <= config.max_positions:
        return None
    return {"rope_type": "yarn", "factor": float(-(-length // config.max_position_embeddings))}


def load(checkpoint: Path, length: int) -> Llama:
    """The model, with YaRN where a text of `length` tokens is longer than its own positions."""
    return checkpoints.load(checkpoint, rope_scaling=yarn(checkpoints.read_config(checkpoint), length))


class Recording:
    """A prefill that can be given to one session after another; stands among the sessions of `prefill`.

    Args:
      session: any of the same prompt and capacity.
    """

    def __init__(self, session: Session):
        # No session's window is shorter, so that all can learn from the queries that are sampled for this one.
        self.zone = Zone(RetrievalConfig().sink_tokens, RetrievalConfig().window)
        self.rope = session.rope
        self.layers: list[tuple[Any, ...]] = []

    def take(self, layer: int, sequence: int, *arrays: Any) -> None:
        self.layers.append(tuple(np.asarray(a) for a in arrays))

    def play(self, session: Session) -> float:
        """Prefills the session; returns the seconds that it took to learn from the prompt and to index it."""
        start = time.perf_counter()
        for layer in range(len(self.layers)):
            self.play_layer(session, layer)
        session.finish_prefill()
        return time.perf_counter() - start

    def play_layer(self, session: Session, layer: int) -> None:
        """Hands one layer to the session."""
        keys, values, queries, positions = self.layers[layer]
        session.take(layer, 0, jnp.asarray(keys), jnp.asarray(values), jnp.asarray(queries), positions)


def _text_tokens(request: Request) -> np.ndarray:
    """The text's tokens [T] int32; ValueError where there are too few."""
    if request.text is None:
        text, name = manual(), "the manual that comes with Python"
    else:
        try:
            text, name = request.text.read_text("utf-8"), str(request.text)
        except UnicodeDecodeError as error:
            raise ValueError(f"{request.text} is not UTF-8 text: {error}") from error
    tokens = np.asarray(load_tokenizer(request.checkpoint).encode(text), np.int32)
    if len(tokens) < request.needed:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, and {request.needed} are needed (the depth, {WARM_UP} steps that "
            f"warm up and the steps that count); give a longer text with --text, or less to measure"
        )
    return tokens


def _scaling(request: Request, config: LlamaConfig, size: int) -> Mapping[str, Any] | None:
    """The RoPE scaling for a depth; the few steps after it do not count."""
    if request.rope_scaling is None:
        return yarn(config, size)
    positions = config.with_rope_scaling(request.rope_scaling).max_positions
    if size > positions:
        raise ValueError(f"{size} tokens are more than the {positions} positions of --rope-scaling")
    return request.rope_scaling


def _measure(
    model: Llama,
    attentions: Mapping[str, RetrievalConfig | None],
    makers: Mapping[str, PeerMaker],
    scaling: Mapping[str, Any] | None,
    tokens: np.ndarray,
    size: int,
    say: Callable[[str], None],
    progress: Callable[[str, str], Any],
) -> list[Row]:
    """The rows of one depth: prefill of the first `size` tokens, decode through the others, if any."""
    prompt, forced = tokens[:size], tokens[size:]

    def session(name: str) -> Session:
        return Session(model, [size], [len(tokens)], attentions[name])

    with contextlib.ExitStack() as stack:
        sessions = {name: stack.enter_context(session(name)) for name in attentions}
        recording = Recording(next(iter(sessions.values())))
        with progress(f"prefill of {size}", "layers") as advance:
            prefill_s = _prefill_seconds(model, prompt, recording, advance)
        say(f"{size} tokens: prefill {prefill_s:.1f} s")
        rows: list[Row] = []
        index_s: dict[str, float | None] = {}
        for name in sessions:
            if sessions[name].offload is None:
                recording.play(sessions[name])
                index_s[name] = None
            else:
                with session(name) as trial:
                    # What one layer teaches compiles what all of them need.
                    recording.play_layer(trial, 0)
                    trial.offload.finish_prefill()  # type: ignore[union-attr]
                index_s[name] = recording.play(sessions[name])
                say(f"{size} tokens: {name} indexed in {index_s[name]:.1f} s")
            rows.append(
                _prefill_row(name, size, prefill_s + (index_s[name] or 0))
                | _bytes(sessions[name])
                | {"index_s": index_s[name]}
            )
        del recording
        peers: dict[str, Peer] = {}
        for name, make in makers.items():
            peers[name] = stack.enter_context(contextlib.closing(make(model, len(tokens), scaling)))
            start = time.perf_counter()
            peers[name].prefill(prompt)
            seconds = time.perf_counter() - start
            say(f"{size} tokens: {name}, prefill {seconds:.1f} s")
            rows.append(_prefill_row(name, size, seconds) | {"device_bytes": peers[name].kv_bytes})
        if len(forced):
            with progress(f"decode at {size}", "steps") as advance:
                rows += [
                    row | {"depth": size, "index_s": index_s.get(row["attention"])}
                    for row in _decode(sessions, peers, forced, advance)
                ]
        return rows


class _Enough(Exception):
    """Ends a prefill after its first layer."""


def _prefill_seconds(model: Llama, prompt: np.ndarray, recording: Recording, advance: OnPrefill) -> float:
    """Prefills into the recording; returns the seconds without compilation."""
    trial: Any = Recording(recording)  # type: ignore[arg-type]

    def stop(done: int, layers: int) -> None:
        raise _Enough

    # A token compiles what turns a hidden state into logits, and one layer of the prompt what runs every layer.
    prefill(model, [prompt[:1]], [trial])
    with contextlib.suppress(_Enough):
        prefill(model, [prompt], [trial], stop)
    start = time.perf_counter()
    prefill(model, [prompt], [recording], advance).block_until_ready()  # type: ignore[list-item]
    return time.perf_counter() - start


def _row(attention: str, test: str) -> Row:
    """A row's keys, with nothing measured."""
    measured = (
        "depth",
        "median_ms",
        "spread_ms",
        "tokens_per_s",
        "kl",
        "device_bytes",
        "host_bytes",
        "index_s",
    )
    return {"attention": attention, "test": test, **dict.fromkeys(measured), "steps": None, "stages": {}}


def _prefill_row(attention: str, size: int, seconds: float) -> Row:
    return _row(attention, "pp") | {
        "depth": size,
        "median_ms": 1e3 * seconds,
        "tokens_per_s": size / seconds,
    }


def _bytes(session: Session) -> Row:
    used = session.store.statistics() if session.store else {"host_kv_bytes": 0, "index_bytes": 0}
    return {"device_bytes": session.device_bytes, "host_bytes": used["host_kv_bytes"] + used["index_bytes"]}


# --- decode


def _decode(
    sessions: Mapping[str, Session], peers: Mapping[str, Peer], forced: np.ndarray, advance: OnPrefill
) -> list[Row]:
    """A row for each attention and peer, stepped in turns through the tokens."""
    steps: dict[str, Callable[[int], Any]] = {n: functools.partial(_step, s) for n, s in sessions.items()}
    steps |= {name: peer.step for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    divergence: dict[str, list[float]] = {name: [] for name in steps}
    before: dict[str, dict[str, float]] = {}
    for first in (0, *range(WARM_UP, len(forced), TURN)):
        if first == WARM_UP:
            before = {name: dict(s.store.seconds) for name, s in sessions.items() if s.store}
        turn = forced[first : first + TURN if first else WARM_UP].tolist()
        logits: dict[str, list[np.ndarray]] = {name: [] for name in steps}
        for name, step in steps.items():
            for token in turn:
                with interrupt.held():
                    start = time.perf_counter()
                    out = step(token)
                    seconds[name].append(time.perf_counter() - start)
                logits[name].append(_log_softmax(out))
        advance(first + len(turn), len(forced))
        if first and "dense" in logits:
            for name, others in logits.items():
                for dense, other in zip(logits["dense"], others, strict=True):
                    divergence[name].append(float(np.exp(dense) @ (dense - other)))
    rows = []
    for name in steps:
        counted = 1e3 * np.array(seconds[name][WARM_UP:])
        quartiles = np.percentile(counted, [25, 50, 75])
        row = _row(name, "tg") | {
            "median_ms": float(quartiles[1]),
            "spread_ms": float(quartiles[2] - quartiles[0]) / 2,
            "tokens_per_s": 1e3 / float(quartiles[1]),
            "kl": float(np.mean(divergence[name])) if divergence[name] else None,
            "steps": len(counted),
        }
        if name in peers:
            rows.append(row | {"device_bytes": peers[name].kv_bytes})
            continue
        session = sessions[name]
        host_ms = dict.fromkeys(("host_search", "host_attention"), 0.0)
        for stage, start in before.get(name, {}).items():
            host_ms[stage] = 1e3 * (session.store.seconds[stage] - start) / len(counted)
        with interrupt.held():
            rows.append(row | _bytes(session) | {"stages": _stages(session, row["median_ms"], host_ms)})
    return rows


def _step(session: Session, token: int) -> jax.Array:
    logits = session.step([token])
    # What follows a step, as the exchange of blocks, counts as well.
    session.wait()
    return logits.block_until_ready()[0]


def _log_softmax(logits: Any) -> np.ndarray:
    """[V] in float64."""
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max()
    return shifted - np.log(np.exp(shifted).sum())


# --- stages, each alone


def _stages(session: Session, step_ms: float, host_ms: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of a step by stage; see the head of this file."""
    c, cache = session.config, session._cache
    assert cache is not None
    heads = len(session.lengths), c.num_key_value_heads, c.groups
    q = np.random.default_rng(0).standard_normal((*heads, c.head_dim)).astype(np.float32)
    layers = c.num_hidden_layers
    parts = (Partial(q, *np.ones((2, *heads), np.float32)),) * (2 if session.offload is None else 3)
    times = {
        "device_kernel": _alone(_kernels, jnp.asarray(q, cache.keys[0].dtype), cache, zone=session.zone),
        **host_ms,
        "callback": 0.0,
        "merge": _alone(_merges, parts, layers=layers),
    }
    if session.offload is not None:
        path = session.offload.path
        times["callback"] = _alone(_callbacks, q, q[:, :, 0], cache.lengths, path=path, layers=layers)
    times["rest"] = step_ms - sum(times.values())
    return {stage: times[stage] for stage in STAGES}


def _alone(function: Callable[..., Any], *arguments: Any, **static: Any) -> float:
    """Median milliseconds of a jitted function."""
    arguments = jax.device_put(arguments)
    times = []
    for _ in range(1 + RUNS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments, **static))
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times[1:]))


def _next_layer(q: jax.Array, part: Partial) -> jax.Array:
    """q, but not before `part` is computed."""
    return q + (TINY * (part.numerator + part.denominator[..., None])).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("zone",))
def _kernels(q: jax.Array, cache: DeviceCache, *, zone: Zone) -> jax.Array:
    """What every layer of a step computes of the keys on the device, as in `models.attention.Attention.decode`."""
    for keys, values, log_counts in zip(cache.keys, cache.values, cache.log_counts, strict=True):
        weights = zone.log_weights(cache.lengths, cache.starts)[:, None]
        weights = jnp.broadcast_to(weights, (*log_counts.shape[:2], zone.size))
        weights = jnp.concatenate([weights, log_counts], axis=2)
        q = _next_layer(q, partial_attention(q, keys, values, weights))
    return q


@functools.partial(jax.jit, static_argnames=("layers",))
def _merges(parts: tuple[Partial, ...], *, layers: int) -> tuple[Partial, ...]:
    """The merge of every layer's partials."""

    def layer(_, parts):
        out = finish(merge(*parts))
        return (dataclasses.replace(parts[0], numerator=parts[0].numerator + TINY * out), *parts[1:])

    return jax.lax.fori_loop(0, layers, layer, parts)


@functools.partial(jax.jit, static_argnames=("path", "layers"))
def _callbacks(q: jax.Array, key: jax.Array, lengths: jax.Array, *, path: Any, layers: int) -> jax.Array:
    """Every layer's callbacks, of queries [B, K, G, H] and a key [B, K, H] that leaves, with nothing behind them."""
    host = CallbackHostPath(jnp.asarray(NOBODY), ())
    for layer in range(layers):
        if path is CallbackHostPath:
            part = host.collect(layer, host.submit(layer, q, key, key, lengths), after=q[..., 0])
        else:
            part = _one_callback(q)
        q = _next_layer(q, part)
    return q


def _one_callback(q: jax.Array) -> Partial:
    """A callback as clusters make them, with nothing to do."""
    nothing = no_keys(*q.shape)
    arrays = nothing.numerator, nothing.denominator, nothing.max
    return Partial(*filled_by_host(_zeros, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays], q))


def _zeros(_: np.ndarray, *out: np.ndarray) -> None:
    for a in out:
        a[...] = 0


# --- what comes of it

COLUMNS = {
    "attention": ("attention", "{}"),
    "test": ("test", "{}"),
    "depth": ("depth", "{}"),
    "ms": ("median_ms", "{:.2f}"),
    "±": ("spread_ms", "{:.2f}"),
    "tokens/s": ("tokens_per_s", "{:.1f}"),
    "KL": ("kl", "{:.5f}"),
    "device": ("device", "{}"),
    "host": ("host", "{}"),
    "index s": ("index_s", "{:.1f}"),
}
STAGE_COLUMNS = {
    "attention": ("attention", "{}"),
    "depth": ("depth", "{}"),
    "ms": ("median_ms", "{:.2f}"),
    **{stage.replace("_", " "): (f"{stage}_ms", "{:.2f}") for stage in STAGES},
}


def flat(row: Row) -> Row:
    """A row with a number per stage in place of `stages`, as a table has it."""
    stages = {f"{stage}_ms": row["stages"].get(stage) for stage in STAGES}
    return {key: value for key, value in row.items() if key != "stages"} | stages


def _shown(row: Row) -> Row:
    """A flat row with its bytes for people."""
    kinds = "device", "host"
    counts = {kind: row[f"{kind}_bytes"] for kind in kinds}
    return flat(row) | {kind: n if n is None else format_bytes(n) for kind, n in counts.items()}


def tables(rows: Sequence[Row]) -> list[Any]:
    """What was measured, and where a decode step's time goes."""
    out = [report.table(map(_shown, rows), COLUMNS)]
    if staged := [flat(row) for row in rows if row["stages"]]:
        out.append(report.table(staged, STAGE_COLUMNS))
    return out


def write(rows: Sequence[Row], json: Path | None, csv: Path | None, markdown: Path | None, plot: Path | None):
    """Writes the files that are wanted."""
    if json is not None:
        report.write(json, report.json_text(rows))
    if csv is not None:
        report.write(csv, report.csv_text([flat(row) for row in rows]))
    if markdown is not None:
        report.write(markdown, report.markdown(map(_shown, rows), COLUMNS | STAGE_COLUMNS))
    decoded = [row for row in rows if row["test"] == "tg"]
    if plot is not None and decoded:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in decoded:
            lines.setdefault(row["attention"], []).append((row["depth"], row["median_ms"]))
        title = f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['device']}"
        report.write(plot, report.lines_png(lines, "tokens of context", "median time per token, ms", title))


def check_outputs(*paths: Path | None, plot: Path | None) -> None:
    """Finds out before the work what would keep a file from being written.

    Raises:
      ValueError: its folder is not there.
      RuntimeError: a picture is wanted, and matplotlib is not there.
    """
    for path in (*paths, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path.absolute().parent} is not a directory, so {path} cannot be written")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install 'rajax[bench]'")
