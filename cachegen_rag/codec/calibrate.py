"""Calibration: learn a model's profile from its own KV over some text, through the engine alone.

1. Samples: KV of documents behind a short prefix, and the queries of the tokens that follow them.
2. Metric: an error dk of a key costs (q . dk)^2, so keys are weighed with the queries' second moment, averaged over
   the rotations of all relative distances; an error dv of a value costs |W_o dv|^2.
3. Sensitivity: from an engine with gradients (transformers), the Fisher information of keys and values, mixed into
   the metric; from others, per layer and kind, the KL of the predictions when these alone are disturbed a little.
4. Transforms and symbol models (:mod:`cachegen_rag.codec.fit`), and what tells a token's importance
   (:mod:`cachegen_rag.codec.importance`).
5. Levels: steps at which the measured KL meets ``TARGET_KL``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec import fit, importance
from cachegen_rag.codec.codec import Codec
from cachegen_rag.codec.profile import Level, Profile, family
from cachegen_rag.errors import ConfigError, ModelError
from cachegen_rag.kernels import cpu
from cachegen_rag.kernels.reference import Rows
from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVModel
from cachegen_rag.rope import RopeSpec, from_interleaved, rotate

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done and steps in all."""

TARGET_KL = (0.001, 0.004, 0.01, 0.02, 0.05, 0.1)
DEFAULT_LEVEL = 4
SINKS = 4
PREFIX, DOCUMENT, CONTINUATION = 32, 768, 128
"""Tokens of a window: a prefix whose KV is not used, the document, and the text that is predicted from it."""
SAMPLE_TOKENS = 12_000
PROBES = 4
"""Windows kept aside to measure KL on."""
FISHER_SHARE, FISHER_DRAWS = 0.6, 6
"""How much of the metric is the measured one, the rest the one derived from queries; and gradients a window."""
PROBE_KL = 0.003
PROBE_ATTEMPTS = 4
"""KL that a disturbed layer is to cause, above the engine's own noise, and how often the size of noise is corrected."""
_DISTANCES = np.unique(np.rint(np.geomspace(1, 2048, 96)).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Window:
    """Token ids of a prefix, a document and its continuation."""

    prefix: list[int]
    document: list[int]
    continuation: list[int]


@dataclass(frozen=True, eq=False)
class Sample:
    """A document's KV, the queries of its continuation (rotation removed), and the attention it received from them."""

    kv: KV
    queries: NDArray[np.float32] | None
    received: NDArray[np.float32] | None


@dataclass(frozen=True, eq=False)
class Probe:
    """A window with the document's exact KV and the predictions behind it (log probabilities)."""

    window: Window
    kv: KV
    logp: NDArray[np.float32]


def calibrate(model: KVModel, texts: Sequence[str], *, progress: Progress | None = None) -> Profile:
    """Learn a profile. The same model and texts give the same profile.

    texts : any text of the kind that will be stored, some 15,000 tokens in all; less gives a weaker profile.
    progress : called now and then with (what, steps done, steps in all).

    Raises
    ------
    ConfigError
        There is too little text.
    ModelError
        The model is refused for splicing: its KV cannot be stored.
    """
    if model.refusal is not None:
        raise ModelError(f"{model.name} cannot be calibrated: {model.refusal}")
    report = progress or (lambda what, done, total: None)
    windows = cut(model, texts)
    samples, queries, received = [], [], []
    for i, window in enumerate(windows):
        report("reading samples", i, len(windows))
        sample = _sample(model, window)
        samples.append(sample.kv)
        queries.append(sample.queries)
        received.append(sample.received)
    probes = [_probe(model, w, kv) for w, kv in zip(windows[:PROBES], samples[:PROBES], strict=True)]
    training = samples[PROBES:] or samples
    metric = fit.Metric(_key_metric(queries, model), _value_metric(model))
    fisher = _fisher(model, windows, report)
    if fisher is not None:
        metric = metric.matched(fisher, FISHER_SHARE)
    else:
        metric = metric.scaled(_sensitivity(model, probes[-1], metric, report))
    report("fitting transforms", 0, 1)
    blocks = fit.fit_blocks(training, metric)
    attention = [a for a in received[PROBES:] or received if a is not None]
    gains = importance.fit(blocks, training, attention) if len(attention) == len(training) else None
    draft = fit.draft(model.shape, family(model.fingerprint), SINKS, blocks, gains)
    steps, kls = _levels(model, probes, draft, report)
    report("fitting symbol models", 0, 1)
    profile = fit.fit_models(draft, training, steps)
    levels = tuple(Level(i + 1, kl, 0.0, step) for i, (step, kl) in enumerate(zip(steps, kls, strict=True)))
    profile = replace(profile, levels=levels, default_level=min(DEFAULT_LEVEL, len(levels)))
    return _with_bits(profile, [p.kv for p in probes])


def cut(model: KVModel, texts: Sequence[str]) -> list[Window]:
    """Windows spread over all texts; shorter ones where there is little text or little context."""
    flat = [i for text in texts for i in model.tokenize(text)]  # windows may span texts, as prompts span documents
    size = min(PREFIX + DOCUMENT + CONTINUATION, model.n_ctx - 2, len(flat) // 3)
    prefix, continuation = min(PREFIX, size // 8), min(CONTINUATION, size // 6)
    document = size - prefix - continuation
    if document < 16:
        raise ConfigError(
            f"{len(flat)} tokens of text are too little to calibrate on; give some 15,000 (100 at the very least)"
        )
    count = min(max(3, SAMPLE_TOKENS // document), len(flat) // size)
    bos = [] if model.bos_id is None else [model.bos_id]
    windows = []
    for start in np.linspace(0, len(flat) - size, count).astype(int).tolist():
        run = flat[start : start + size]
        cuts = prefix, prefix + document
        windows.append(Window(bos + run[: cuts[0]], run[cuts[0] : cuts[1]], run[cuts[1] :]))
    return windows


def _sample(model: KVModel, window: Window) -> Sample:
    start, stop = len(window.prefix), len(window.prefix) + len(window.document)
    with model.session() as session:
        session.decode(window.prefix + window.document)
        whole, kv = session.export(0, stop), session.export(start, stop)
        try:
            _, queries = session.decode_with_queries(window.continuation)
        except (ModelError, NotImplementedError):
            queries = None
    received = None
    if queries is not None:
        rope = RopeSpec(model.rope.inv_freq, "interleaved")
        keys = rotate(_host(whole.keys), np.arange(stop), rope)
        some = slice(None, None, max(1, len(window.continuation) // 48))
        behind = rotate(queries[:, some], (stop + np.arange(len(window.continuation)))[some], rope)
        everything = KV(keys, _host(whole.values), whole.token_ids, whole.positions)
        received = importance.attention(everything, slice(start, stop), behind, model.shape.key_dim**-0.5)
    keys, values = _host(kv.keys).astype(np.float16), _host(kv.values).astype(np.float16)
    return Sample(KV(keys, values, kv.token_ids, kv.positions), queries, received)


def _host(array: Any) -> NDArray[Any]:
    """An engine's array in this machine's memory, as numpy."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.detach().float().cpu())


def _logp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _predict(model: KVModel, window: Window, kv: KV) -> NDArray[np.float32]:
    """Log probabilities over the continuation when ``kv`` stands for the document."""
    start, stop = len(window.prefix), len(window.prefix) + len(kv)
    with model.session() as session:
        session.decode(window.prefix)
        target = session.stage(np.arange(start, stop, dtype=np.int32))
        for layer in range(model.shape.layers):
            turned = rotate(kv.keys[layer], target.positions, target.rope)
            _write(target.keys[layer], from_interleaved(turned, target.rope))
            _write(target.values[layer], kv.values[layer])
        session.commit(target)
        session.take(start, stop, window.document)
        logits = session.decode(window.continuation, logits=True)
    assert logits is not None
    return _logp(logits)


def _write(rows: Any, values: NDArray[Any]) -> None:
    if isinstance(rows, np.ndarray):
        rows[...] = values
    else:  # a tensor of another library that takes numpy arrays
        import torch

        rows.copy_(torch.from_numpy(np.ascontiguousarray(values, np.float32)))


def _probe(model: KVModel, window: Window, kv: KV) -> Probe:
    return Probe(window, kv, _predict(model, window, kv))


def kl_of(model: KVModel, probe: Probe, kv: KV) -> float:
    """KL per token, in nats, of the predictions behind ``kv`` from those behind the exact KV."""
    other = _predict(model, probe.window, kv)
    return float((np.exp(probe.logp) * (probe.logp - other)).sum(-1).mean())


def _key_metric(queries: Sequence[NDArray[np.float32] | None], model: KVModel) -> NDArray[np.float64]:
    """E[R^T q q^T R] per layer, block diagonal over KV heads, averaged over relative distances."""
    shape = model.shape
    out = np.zeros((shape.layers, shape.key_channels, shape.key_channels))
    known = [q for q in queries if q is not None]
    if not known:
        return fit.Metric.identity(shape).keys
    rope = RopeSpec(model.rope.inv_freq, "interleaved")
    turns = rotate(np.tile(np.eye(shape.key_dim, dtype=np.float32)[:, None], (1, len(_DISTANCES), 1))[:, :, None],
                   _DISTANCES, rope)[:, :, 0].astype(np.float64)  # fmt: skip
    # rows of turns[:, d] are rotated unit vectors: R_d^T, so q rotated back by d is q @ turns[:, d].T
    group = known[0].shape[2] // shape.kv_heads
    for layer in range(shape.layers):
        for head in range(shape.kv_heads):
            q = np.concatenate(
                [k[layer, :, head * group : (head + 1) * group].reshape(-1, shape.key_dim) for k in known]
            )
            moment = (q.T @ q).astype(np.float64) / len(q) * group
            mean = np.einsum("adi,ij,bdj->ab", turns, moment, turns, optimize=True) / len(_DISTANCES)
            span = slice(head * shape.key_dim, (head + 1) * shape.key_dim)
            out[layer, span, span] = mean / shape.key_dim
    return out


def _value_metric(model: KVModel) -> NDArray[np.float64]:
    """Sum over a KV head's query heads of W_o W_o^T, or the identity if the engine cannot tell its weights."""
    shape = model.shape
    weights = getattr(model, "output_weights", None)
    if weights is None:
        return fit.Metric.identity(shape).values
    out = np.zeros((shape.layers, shape.value_channels, shape.value_channels))
    for layer, matrix in enumerate(weights()):
        heads = len(matrix) // shape.value_dim
        per_head = np.asarray(matrix, np.float64).reshape(heads, shape.value_dim, -1)
        for head in range(heads):
            first = head // (heads // shape.kv_heads) * shape.value_dim
            span = slice(first, first + shape.value_dim)
            out[layer, span, span] += per_head[head] @ per_head[head].T
    return out


def _fisher(model: KVModel, windows: Sequence[Window], report: Progress) -> fit.Metric | None:
    """What errors cost by the model's own gradients, if the engine has gradients."""
    gradients: Any = getattr(model, "kv_fisher", None)
    if gradients is None:
        return None
    keys, values = np.zeros(()), np.zeros(())
    for i, w in enumerate(windows):
        report("measuring what errors cost", i, len(windows))
        k, v = gradients(w.prefix, w.document, w.continuation, draws=FISHER_DRAWS, seed=i)
        keys, values = keys + k, values + v
    return fit.Metric(keys, values)


def _sensitivity(model: KVModel, probe: Probe, metric: fit.Metric, report: Progress) -> NDArray[np.float64]:
    """KL per unit of the metric's error, ``[layers, 2]``, from disturbing one layer's keys or values at a time.

    Noise has the metric's inverse as its covariance, so it is what equal steps in all components would make. It has
    to be small, for KL grows with its square only while it is small; and large enough to stand above the rounding
    noise of the engine, which is measured first. So its size is sought until the KL is about ``target``.
    """
    layers = model.shape.layers
    out = np.ones((layers, 2))
    rng = np.random.default_rng(0)
    floor = kl_of(model, probe, _shaken(probe.kv, rng))
    target = PROBE_KL + 2 * floor
    fraction = [0.05, 0.05]
    for layer in range(layers):
        for kind, m in enumerate((metric.keys, metric.values)):
            report("measuring sensitivities", 2 * layer + kind, 2 * layers)
            exact = (probe.kv.values if kind else probe.kv.keys)[layer]
            flat = exact.reshape(len(exact), -1).astype(np.float64)
            root, vectors = fit.metric_root(m[layer])
            noise = rng.standard_normal(flat.shape) @ (vectors / root).T
            spread = np.sqrt((((flat - flat.mean(0)) @ vectors * root) ** 2).mean()) + 1e-12
            for _ in range(PROBE_ATTEMPTS):
                size = fraction[kind] * spread
                disturbed = (flat + size * noise).reshape(exact.shape).astype(np.float32)
                kl = max(kl_of(model, probe, _with_layer(probe.kv, layer, kind, disturbed)) - floor, 1e-7)
                if target / 3 < kl < target * 3 or fraction[kind] >= 1:
                    break
                fraction[kind] = min(1.0, fraction[kind] * float(np.clip(np.sqrt(target / kl), 0.1, 5.0)))
            out[layer, kind] = kl / size**2
    return out / np.exp(np.log(out).mean())


def _shaken(kv: KV, rng: np.random.Generator) -> KV:
    """``kv`` with noise of a thousandth of every channel's spread: what it does to the predictions is rounding."""

    def shake(x: NDArray[Any]) -> NDArray[np.float32]:
        noise = rng.standard_normal(x.shape, np.float32) * x.astype(np.float32).std(axis=1, keepdims=True)
        shaken: NDArray[np.float32] = x.astype(np.float32) + 1e-3 * noise
        return shaken

    return KV(shake(kv.keys), shake(kv.values), kv.token_ids, kv.positions)


def _with_layer(kv: KV, layer: int, kind: int, rows: NDArray[np.float32]) -> KV:
    keys, values = kv.keys, kv.values
    if kind:
        values = values.copy()
        values[layer] = rows
    else:
        keys = keys.copy()
        keys[layer] = rows
    return KV(keys, values, kv.token_ids, kv.positions)


def coded(profile: Profile, kv: KV, step: int) -> KV:
    """What ``kv`` becomes at a step, without going through bytes."""
    keys, values = np.empty(kv.keys.shape, np.float32), np.empty(kv.values.shape, np.float32)
    nothing = np.zeros((len(kv), 0), np.float32)
    for coder, _, gain, symbols, escapes in fit.quantized(profile, [kv], step):
        arrays = [
            (values if c.is_value else keys)[c.layer][:, c.head : c.head + c.heads] for c in coder.transform.cells
        ]
        cpu.reconstruct(symbols, escapes, coder.transform, Rows(arrays, nothing, nothing, False), gain)
    return KV(keys, values, kv.token_ids, kv.positions)


def _levels(model: KVModel, probes: Sequence[Probe], draft: Profile, report: Progress) -> tuple[list[int], list[float]]:
    """Steps for ``TARGET_KL``, finest first, and the KL expected at each, from KL measured at a few steps."""
    scales = np.concatenate([b.scale for b in draft.blocks]).astype(np.float64)

    def rate(step: float) -> float:
        return float(np.maximum(0, 0.5 * np.log2(1 + 12 * 4.0 ** ((scales - step) / 4))).mean())

    middle = next(s for s in range(-200, 400) if rate(s) < 0.8)
    tried = np.array([middle - 10, middle - 5, middle, middle + 4, middle + 8])
    kls = []
    for i, step in enumerate(tried.tolist()):
        report("measuring levels", i, len(tried))
        kls.append(np.mean([kl_of(model, p, coded(draft, p.kv, step)) for p in probes]))
    logs = np.log(np.maximum.accumulate(np.maximum(kls, 1e-6)))
    # Below what was tried, KL falls with the square of the step: 2 ** (step / 4) squared.
    slope = np.log(2) / 2
    steps: list[int] = []
    for target in np.log(TARGET_KL):
        if target < logs[0]:
            step = tried[0] - (logs[0] - target) / slope
        elif target > logs[-1]:
            step = tried[-1] + (target - logs[-1]) / slope
        else:
            step = float(np.interp(target, logs + 1e-9 * np.arange(len(logs)), tried))
        steps.append(max(round(step), steps[-1] + 1 if steps else -10_000))
    return steps, list(TARGET_KL)


def _with_bits(profile: Profile, kvs: Sequence[KV]) -> Profile:
    codec = Codec(profile)
    elements = sum(len(kv) * kv.shape.elements_per_token for kv in kvs)
    levels = tuple(
        replace(level, bits=8 * sum(len(codec.encode(kv, level.index)) for kv in kvs) / elements)
        for level in profile.levels
    )
    return replace(profile, levels=levels, _bytes=None)
