"""Training runs side by side: a frozen config in, a history out, divergence recorded as data.

A run is one slice of the leading axis. It draws its own prompts from its seed, steps on its own gradient, and when it
diverges its slice is frozen and left out of the program: nothing it does can reach another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from scipy.stats import binomtest
from torch import Tensor

import lipattn
from lipattn._validate import choice, fraction, integer, non_negative, positive, refuse
from lipattn.curvature import top_hessian_eigenvalue
from lipattn.diagnostics import (
    column_mass,
    entropy,
    frobenius_norm,
    live_mean,
    live_rows,
    logit_variance,
    spectral_norm,
)
from lipattn.model import BLOCKS, FIXED_ATTENTION, forward, init_std_for, init_weights, predict
from lipattn.reweighting import REWEIGHTINGS
from lipattn.tasks import EVALUATION, null_loss, sample_prompts, seed_tensor

__all__ = ["DEAD_ABOVE", "OPTIMIZERS", "History", "Survival", "TrainConfig", "evaluate", "survival", "train"]

DEAD_ABOVE = 1e6  # times the null loss
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a set of runs. Vary it with :func:`dataclasses.replace`.

    Attributes:
        seeds: one a run; all different.
        reweighting: a name in `REWEIGHTINGS`.
        reweighting_options: keyword arguments for its ``weights``.
        d: dimension of x; the hidden width is D = d + 1.
        n_context: pairs in a prompt; attention is over n_context + 1 tokens.
        batch: fresh prompts a step and run.
        layers, heads, residual: the stack.
        optimizer: ``sgd``, ``momentum`` (heavy ball, 0.9 by default), ``adam`` or ``adamw``.
        learning_rate: η.
        momentum: of ``momentum``.
        betas, epsilon, weight_decay: of ``adam`` and ``adamw``; ``adam`` takes no weight decay.
        steps: updates.
        init_std: standard deviation of the entries of every W.
        logit_std: if given, W_Q and W_K start with the std that makes the expected initial logit std this number.
        frozen: blocks that are not trained, of ``W_Q``, ``W_K``, ``W_V``.
        fixed_attention: None, ``uniform``, ``one_token`` or ``cyclic``: P that does not look at the tokens.
        record_every: steps between recorded diagnostics (the loss is recorded at every step).
        spectral_every: steps between recordings of ‖P‖₂; 0 for never.
        sharpness_every: steps between top Hessian eigenvalues, on the step's own batch; 0 for never.
        sharpness_blocks: blocks that this Hessian is taken in; trained or not.
        sharpness_iterations: Hessian-vector products for each.
        dtype: ``float32`` or ``float64``.
        device: where it runs.

    Raises:
        ValueError: for any setting out of its range, named with its value.
    """

    seeds: Sequence[int] = tuple(range(32))
    reweighting: str = "softmax"
    reweighting_options: Mapping[str, Any] = field(default_factory=dict)
    d: int = 2
    n_context: int = 20
    batch: int = 32
    layers: int = 1
    heads: int = 1
    residual: bool = True
    optimizer: str = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    steps: int = 200
    init_std: float = 0.5
    logit_std: float | None = None
    frozen: Sequence[str] = ()
    fixed_attention: str | None = None
    record_every: int = 1
    spectral_every: int = 0
    sharpness_every: int = 0
    sharpness_blocks: Sequence[str] = BLOCKS
    sharpness_iterations: int = 10
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        seed_tensor(self.seeds)
        choice("reweighting", self.reweighting, REWEIGHTINGS)
        unknown = sorted(set(self.reweighting_options) - set(REWEIGHTINGS[self.reweighting].options))
        if unknown:
            raise refuse(
                "reweighting_options",
                f"options of {self.reweighting} ({sorted(REWEIGHTINGS[self.reweighting].options)})",
                unknown,
            )
        for name in ("d", "n_context", "batch", "layers", "heads", "record_every", "sharpness_iterations"):
            integer(name, getattr(self, name), minimum=1)
        for name in ("steps", "spectral_every", "sharpness_every"):
            integer(name, getattr(self, name), minimum=0)
        choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("learning_rate", "weight_decay", "init_std"):
            non_negative(name, getattr(self, name))
        if self.weight_decay and self.optimizer != "adamw":
            raise refuse("weight_decay", "0 unless optimizer='adamw'", self.weight_decay)
        positive("epsilon", self.epsilon)
        for name, value in (("momentum", self.momentum), *(("betas", b) for b in self.betas)):
            if fraction(name, value) == 1:
                raise refuse(name, "in [0, 1)", value)
        if self.logit_std is not None:
            non_negative("logit_std", self.logit_std)
        for name in ("frozen", "sharpness_blocks"):
            blocks = getattr(self, name)
            if isinstance(blocks, str) or not set(blocks) <= set(BLOCKS):
                raise refuse(name, f"a sequence of blocks out of {BLOCKS}", blocks)
        if not self.sharpness_blocks:
            raise refuse("sharpness_blocks", f"a non-empty sequence of blocks out of {BLOCKS}", self.sharpness_blocks)
        if self.fixed_attention is not None:
            choice("fixed_attention", self.fixed_attention, FIXED_ATTENTION)
        choice("dtype", self.dtype, ("float32", "float64"))
        object.__setattr__(self, "seeds", tuple(int(s) for s in self.seeds))
        object.__setattr__(self, "frozen", tuple(self.frozen))
        object.__setattr__(self, "sharpness_blocks", tuple(self.sharpness_blocks))

    @property
    def width(self) -> int:
        """Hidden width D = d + 1."""
        return self.d + 1

    @property
    def tokens(self) -> int:
        """Tokens in a prompt, the query included."""
        return self.n_context + 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@dataclass(frozen=True, kw_only=True)
class History:
    """What a set of runs did. Rows are runs; NaN marks what was not measured, after a run's death above all.

    Every recorded quantity is that *before* the update of its step, on that step's batch. Quantities of P are means
    over batch and heads (and, for those of a row, over live rows).

    Attributes:
        config: what was asked for.
        version: of the library.
        diverged_at: first step at which loss or gradient was not finite or the loss exceeded 10⁶ × null loss; −1 for
            runs that lived.
        loss: mean squared error, at every step; the value that killed a run is kept, whatever it is.
        recorded_steps: the steps of the quantities below.
        entropy: attention entropy in nats.
        query_entropy: the same for the query row alone.
        query_sum_of_squares: Σp² of the query row over the context tokens; the curvature of the value path.
        frobenius_norm: ‖P‖_F, between 1 and √tokens for row-stochastic P without dead rows.
        column_mass: largest column sum of P, between 1 and tokens likewise.
        logit_variance: variance over the keys of q kᵀ/√D, for every mechanism.
        dead_rows: fraction of rows that attend to nothing.
        gradient_norm, weight_norm: Frobenius norms by block.
        spectral_steps, spectral_norm: ‖P‖₂ at its own cadence.
        sharpness_steps, sharpness: largest eigenvalue of the Hessian in `config.sharpness_blocks` at its own cadence.
        weights: after the last update; of a dead run, as they were when it died.
    """

    config: TrainConfig
    version: str
    diverged_at: Int64[Tensor, " runs"]
    loss: Float[Tensor, "runs steps"]
    recorded_steps: Int64[Tensor, " recorded"]
    entropy: Float[Tensor, "runs recorded layers"]
    query_entropy: Float[Tensor, "runs recorded layers"]
    query_sum_of_squares: Float[Tensor, "runs recorded layers"]
    frobenius_norm: Float[Tensor, "runs recorded layers"]
    column_mass: Float[Tensor, "runs recorded layers"]
    logit_variance: Float[Tensor, "runs recorded layers"]
    dead_rows: Float[Tensor, "runs recorded layers"]
    gradient_norm: dict[str, Tensor]  # each (runs, recorded, layers)
    weight_norm: dict[str, Tensor]
    spectral_steps: Int64[Tensor, " spectral"]
    spectral_norm: Float[Tensor, "runs spectral layers"]
    sharpness_steps: Int64[Tensor, " sharp"]
    sharpness: Float[Tensor, "runs sharp"]
    weights: dict[str, Tensor]

    @property
    def diverged(self) -> Bool[Tensor, " runs"]:
        """Which runs died."""
        return self.diverged_at >= 0

    @property
    def normalized_entropy(self) -> Float[Tensor, "runs recorded layers"]:
        """Entropy over ln(tokens): 1 uniform, 0 one-hot; NaN with a single token."""
        return self.entropy / math.log(self.config.tokens) if self.config.tokens > 1 else self.entropy * math.nan

    def last(self, quantity: Float[Tensor, "runs steps *rest"]) -> Float[Tensor, runs * rest]:
        """The last measured value of each run: before its death, or at the end; NaN if there was none."""
        finite = quantity.flatten(2).isfinite().all(-1) if quantity.dim() > 2 else quantity.isfinite()
        position = torch.arange(quantity.shape[1], device=quantity.device)
        index = torch.where(finite, position, -1).amax(1)
        value = quantity[torch.arange(len(index), device=index.device), index.clamp_min(0)]
        return torch.where((index >= 0).view(-1, *[1] * (value.dim() - 1)), value, torch.nan)


@dataclass(frozen=True)
class Survival:
    """How many of n runs lived, with the 95 % Wilson interval of the fraction."""

    alive: int
    n: int
    low: float
    high: float

    @property
    def fraction(self) -> float:
        """alive / n."""
        return self.alive / self.n

    @property
    def dead(self) -> int:
        """n − alive."""
        return self.n - self.alive


def survival(diverged: Bool[Tensor, " runs"], confidence: float = 0.95) -> Survival:
    """Fraction of runs that lived, with its Wilson score interval.

    Args:
        diverged: which runs died, as in ``history.diverged``.
        confidence: of the interval.

    Raises:
        ValueError: if there are no runs or `confidence` is not in (0, 1).

    Source: Wilson 1927, as scipy.stats computes it.
    """
    if not 0 < confidence < 1:
        raise refuse("confidence", "in (0, 1)", confidence)
    n = len(diverged)
    if n == 0:
        raise refuse("diverged", "of at least one run", tuple(diverged.shape))
    alive = n - int(diverged.sum())
    interval = binomtest(alive, n).proportion_ci(confidence, method="wilson")
    return Survival(alive, n, float(interval.low), float(interval.high))


class _Optimizer:
    """Element by element, so that each run's slice is stepped as if it were alone."""

    def __init__(self, config: TrainConfig, weights: dict[str, Tensor]):
        self.config, self.count = config, 0
        kept = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}[config.optimizer]
        self.state = [{b: torch.zeros_like(w) for b, w in weights.items()} for _ in range(kept)]

    def keep(self, rows: Tensor) -> None:
        self.state = [{b: s[rows] for b, s in part.items()} for part in self.state]

    def step(self, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        c = self.config
        self.count += 1
        stepped = dict(weights)
        for block, g in gradients.items():
            w = weights[block]
            if c.optimizer == "sgd":
                stepped[block] = w - c.learning_rate * g
            elif c.optimizer == "momentum":
                velocity = self.state[0][block] = c.momentum * self.state[0][block] + g
                stepped[block] = w - c.learning_rate * velocity
            else:
                b1, b2 = c.betas
                m = self.state[0][block] = b1 * self.state[0][block] + (1 - b1) * g
                v = self.state[1][block] = b2 * self.state[1][block] + (1 - b2) * g * g
                m_hat, root = m / (1 - b1**self.count), (v / (1 - b2**self.count)).sqrt()
                stepped[block] = w * (1 - c.learning_rate * c.weight_decay) - c.learning_rate * m_hat / (
                    root + c.epsilon
                )
        return stepped


def _losses(config: TrainConfig, weights: Mapping[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    prediction = predict(
        weights,
        tokens,
        reweighting=config.reweighting,
        options=config.reweighting_options,
        residual=config.residual,
        fixed_attention=config.fixed_attention,
    )
    return (prediction - targets).square().mean(1)


class _Recorder:
    """Tables of NaN that are filled for the runs still alive."""

    def __init__(self, config: TrainConfig):
        self.config = config

        def cadence(every: int) -> Tensor:
            return torch.arange(0, config.steps, every) if every else torch.arange(0)

        self.steps = {
            "recorded": cadence(config.record_every),
            "spectral": cadence(config.spectral_every),
            "sharp": cadence(config.sharpness_every),
        }
        runs = len(config.seeds)

        def table(kind: str, *rest: int) -> Tensor:
            shape = (runs, len(self.steps[kind]), *rest)
            return torch.full(shape, torch.nan, dtype=config.torch_dtype, device=config.device)

        per_layer = ("entropy", "query_entropy", "query_sum_of_squares", "frobenius_norm", "column_mass")
        self.tables = {name: table("recorded", config.layers) for name in (*per_layer, "logit_variance", "dead_rows")}
        self.gradient_norm = {b: table("recorded", config.layers) for b in BLOCKS}
        self.weight_norm = {b: table("recorded", config.layers) for b in BLOCKS}
        self.spectral_norm = table("spectral", config.layers)
        self.sharpness = table("sharp")

    @torch.no_grad()
    def attention(self, step: int, rows: Tensor, weights: Mapping[str, Tensor], tokens: Tensor) -> None:
        c = self.config
        record = step % c.record_every == 0
        spectral = c.spectral_every and step % c.spectral_every == 0
        if not (record or spectral):
            return
        _, layers = forward(
            weights,
            tokens,
            reweighting=c.reweighting,
            options=c.reweighting_options,
            residual=c.residual,
            fixed_attention=c.fixed_attention,
        )

        def put(name: str, layer: int, value: Tensor) -> None:
            self.tables[name][rows, step // c.record_every, layer] = value

        for number, (p, scores) in enumerate(layers):
            if record:
                h = entropy(p)
                put("entropy", number, _mean(live_mean(h, p)))
                put("query_entropy", number, _mean(h[..., -1]))
                put("query_sum_of_squares", number, _mean(p[..., -1, :-1].square().sum(-1)))
                put("frobenius_norm", number, _mean(frobenius_norm(p)))
                put("column_mass", number, _mean(column_mass(p).amax(-1)))
                put("logit_variance", number, _mean(logit_variance(scores).mean(-1)))
                put("dead_rows", number, _mean((~live_rows(p)).to(p.dtype).mean(-1)))
            if spectral:
                self.spectral_norm[rows, step // c.spectral_every, number] = _mean(spectral_norm(p))

    def norms(self, step: int, rows: Tensor, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        if step % self.config.record_every:
            return
        at = step // self.config.record_every
        for b in BLOCKS:
            self.weight_norm[b][rows, at] = weights[b].flatten(2).norm(dim=2)
            if b in gradients:
                self.gradient_norm[b][rows, at] = gradients[b].flatten(2).norm(dim=2)


def _mean(x: Tensor) -> Tensor:
    """Mean over heads and batch of what is defined; (runs, heads, batch) → (runs,)."""
    return x.flatten(1).nanmean(1)


def train(config: TrainConfig) -> History:
    """Train every run of `config`, side by side.

    Each run at each step draws its own prompts, and its loss depends on its own weights alone; the summed loss
    therefore has every run's own gradient. The gradient comes from the query row only (see
    :func:`lipattn.model.predict`); what is recorded comes from a separate pass over all rows, so that recording
    more or less often changes no run.

    Returns:
        A :class:`History` with one row a run, in the order of `config.seeds`.

    Source: the setting of hong2024transformer as its reviewers describe it; the rule of death: ours, chapter 4.
    """
    seeds = torch.tensor(config.seeds, dtype=torch.int64)
    runs, device, dtype = len(seeds), config.device, config.torch_dtype
    std: dict[str, float] = dict.fromkeys(BLOCKS, config.init_std)
    if config.logit_std is not None:
        std |= {b: init_std_for(config.logit_std, config.d) for b in ("W_Q", "W_K")}
    final = init_weights(
        config.seeds,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        init_std=std,
        dtype=dtype,
        device=device,
    )
    weights = {b: w.clone() for b, w in final.items()}
    trained = tuple(b for b in BLOCKS if b not in config.frozen)
    optimizer, recorder = _Optimizer(config, weights), _Recorder(config)
    loss = torch.full((runs, config.steps), torch.nan, dtype=dtype, device=device)
    diverged_at = torch.full((runs,), -1, dtype=torch.int64)
    alive = torch.arange(runs)
    too_large = DEAD_ABOVE * null_loss(config.d)

    for step in range(config.steps):
        if not len(alive):
            break
        tokens, targets = sample_prompts(
            seeds[alive].tolist(),
            step,
            n_context=config.n_context,
            d=config.d,
            batch=config.batch,
            dtype=dtype,
            device=device,
        )
        recorder.attention(step, alive, weights, tokens)
        if config.sharpness_every and step % config.sharpness_every == 0:
            recorder.sharpness[alive, step // config.sharpness_every] = top_hessian_eigenvalue(
                partial(_losses, config, tokens=tokens, targets=targets),
                weights,
                blocks=tuple(config.sharpness_blocks),
                iterations=config.sharpness_iterations,
            )
        leaves = {b: w.detach().requires_grad_(b in trained) for b, w in weights.items()}
        values = _losses(config, leaves, tokens, targets)
        loss[alive, step] = values.detach()
        gradients: dict[str, Tensor] = {}
        if trained and values.requires_grad:
            found = torch.autograd.grad(values.sum(), [leaves[b] for b in trained], materialize_grads=True)
            gradients = dict(zip(trained, found, strict=True))
        recorder.norms(step, alive, weights, gradients)

        ok = (values.detach() <= too_large).cpu()  # False for NaN
        for g in gradients.values():
            ok &= g.flatten(1).isfinite().all(1).cpu()
        stepped = optimizer.step(weights, gradients)
        if not ok.all():
            diverged_at[alive[~ok]] = step
            for b in BLOCKS:
                final[b][alive[~ok]] = weights[b][~ok]
            alive = alive[ok]
            optimizer.keep(ok)
            stepped = {b: w[ok] for b, w in stepped.items()}
        weights = stepped

    for b in BLOCKS:
        final[b][alive] = weights[b]
    return History(
        config=config,
        version=lipattn.__version__,
        diverged_at=diverged_at,
        loss=loss,
        recorded_steps=recorder.steps["recorded"],
        **recorder.tables,
        gradient_norm=recorder.gradient_norm,
        weight_norm=recorder.weight_norm,
        spectral_steps=recorder.steps["spectral"],
        spectral_norm=recorder.spectral_norm,
        sharpness_steps=recorder.steps["sharp"],
        sharpness=recorder.sharpness,
        weights=final,
    )


def evaluate(history: History, *, batch: int = 256, step: int = 0) -> Float[Tensor, " runs"]:
    """Loss of each run's final weights on fresh prompts that no step of training saw.

    Dead runs get infinity: their last weights may still give a finite loss, but the run has no result.

    Args:
        history: of the runs.
        batch: prompts a run.
        step: which evaluation batch.

    Raises:
        ValueError: if `batch` < 1 or `step` < 0.

    Source: ours, chapter 4.
    """
    c = dataclasses.replace(history.config, batch=batch)
    tokens, targets = sample_prompts(
        c.seeds,
        step,
        n_context=c.n_context,
        d=c.d,
        batch=c.batch,
        stream=EVALUATION,
        dtype=c.torch_dtype,
        device=c.device,
    )
    with torch.no_grad():
        value = _losses(c, history.weights, tokens, targets)
    return torch.where(history.diverged.to(value.device), torch.inf, value)
