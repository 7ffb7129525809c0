"""A run is what it would be alone; divergence is data; every knob does what it says and nothing else."""

import dataclasses
import math

import pytest
import torch

import lipattn
from lipattn.model import BLOCKS, init_weights, predict
from lipattn.reweighting import REWEIGHTINGS
from lipattn.tasks import null_loss, sample_prompts
from lipattn.training import DEAD_ABOVE, OPTIMIZERS, History, TrainConfig, evaluate, survival, train

SMALL = TrainConfig(seeds=(0, 1, 2), d=2, n_context=6, batch=4, steps=12, learning_rate=0.1)
EXACT = dataclasses.replace(SMALL, dtype="float64")
TABLES = ("loss", "entropy", "query_entropy", "query_sum_of_squares", "frobenius_norm", "column_mass", "logit_variance")


def rows(history: History, which) -> dict[str, torch.Tensor]:
    named = {name: getattr(history, name)[which] for name in (*TABLES, "diverged_at", "dead_rows", "sharpness")}
    for b in BLOCKS:
        named[f"weights {b}"] = history.weights[b][which]
        named[f"gradient {b}"] = history.gradient_norm[b][which]
    return named


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The run itself to the last bit; means that are only looked at to rounding (their order of summing may differ)."""
    for name, value in one.items():
        if name in ("loss", "diverged_at") or name.startswith("weights"):
            assert torch.equal(value.nan_to_num(-7), other[name].nan_to_num(-7)), name
        else:
            assert torch.allclose(value, other[name], rtol=1e-4, atol=1e-6, equal_nan=True), name


# --- a run and its company ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REWEIGHTINGS)
def test_a_run_alone_equals_the_run_in_company_to_the_last_bit(name):
    config = dataclasses.replace(SMALL, reweighting=name, seeds=tuple(range(7)), layers=2)
    together = train(config)
    for seed in (0, 4):
        alone = train(dataclasses.replace(config, seeds=(seed,)))
        assert_same(rows(alone, [0]), rows(together, [seed]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_explodes_touches_no_other(optimizer):
    """At this rate some seeds die and some live; those that live are, to the last bit, the runs they are alone."""
    rate = {"sgd": 0.35, "momentum": 0.3, "adam": 0.05, "adamw": 0.05}[optimizer]
    config = TrainConfig(seeds=tuple(range(12)), steps=60, optimizer=optimizer, learning_rate=rate, sharpness_every=20)
    history = train(config)
    if optimizer in ("sgd", "momentum"):
        assert 0 < int(history.diverged.sum()) < 12
    for run in range(0, 12, 4):
        assert_same(rows(train(dataclasses.replace(config, seeds=(run,))), [0]), rows(history, [run]))


def test_recording_changes_no_run():
    plain = train(dataclasses.replace(SMALL, record_every=5))
    full = train(dataclasses.replace(SMALL, record_every=1, spectral_every=2, sharpness_every=3))
    assert torch.equal(plain.loss, full.loss)
    assert torch.equal(plain.entropy, full.entropy[:, ::5])
    assert full.spectral_steps.tolist() == [0, 2, 4, 6, 8, 10]
    assert full.spectral_norm.shape == (3, 6, 1)
    assert full.sharpness.shape == (3, 4)
    assert plain.sharpness.shape == (3, 0)


def test_same_config_gives_the_same_history():
    assert_same(rows(train(SMALL), slice(None)), rows(train(SMALL), slice(None)))


# --- what one step does ---------------------------------------------------------------------------------------------


def start(config):
    w = init_weights(config.seeds, width=config.width, layers=config.layers, dtype=config.torch_dtype)
    batch = sample_prompts(
        config.seeds, 0, n_context=config.n_context, d=config.d, batch=config.batch, dtype=config.torch_dtype
    )
    return w, batch


@pytest.mark.parametrize("name", ["softmax", "relu_kernel", "elu_kernel", "qk_layernorm"])
def test_one_sgd_step_follows_finite_differences(name):
    config = dataclasses.replace(EXACT, reweighting=name, steps=1, layers=2)
    w, (tokens, targets) = start(config)
    after = train(config).weights

    def loss(weights):
        return (predict(weights, tokens, reweighting=name) - targets).square().mean(1)

    h = 1e-6
    for b in BLOCKS:
        for place in ((0, 0, 1, 2), (1, 0, 0, 0)):  # layer, head, row, column
            up, down = ({k: v.clone() for k, v in w.items()} for _ in range(2))
            up[b][:, *place] += h
            down[b][:, *place] -= h
            slope = (loss(up) - loss(down)) / (2 * h)
            assert torch.allclose(w[b][:, *place] - 0.1 * slope, after[b][:, *place], atol=1e-8)


@pytest.mark.parametrize(
    ("optimizer", "build"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.03)),
    ],
)
def test_optimizers_equal_those_of_torch(optimizer, build):
    """A plain loop over one run, as a user would write it."""
    config = dataclasses.replace(
        EXACT, optimizer=optimizer, weight_decay=0.03 if optimizer == "adamw" else 0.0, seeds=(3,)
    )
    weights, _ = start(config)
    weights = {b: w.requires_grad_() for b, w in weights.items()}
    torch_optimizer = build(list(weights.values()))
    losses = []
    for step in range(config.steps):
        tokens, targets = sample_prompts(config.seeds, step, n_context=6, d=2, batch=4, dtype=torch.float64)
        loss = (predict(weights, tokens) - targets).square().mean()
        torch_optimizer.zero_grad()
        loss.backward()
        torch_optimizer.step()
        losses.append(loss.item())
    history = train(config)
    assert torch.allclose(history.loss[0], torch.tensor(losses), rtol=1e-10)
    for b in BLOCKS:
        assert torch.allclose(history.weights[b], weights[b], rtol=1e-9)


@pytest.mark.parametrize("block", BLOCKS)
def test_frozen_blocks_do_not_move_and_the_others_do(block):
    history = train(dataclasses.replace(SMALL, frozen=(block,)))
    before, _ = start(SMALL)
    for b in BLOCKS:
        assert torch.equal(history.weights[b], before[b]) == (b == block)
    assert bool(history.gradient_norm[block].isnan().all())


def test_nothing_moves_at_rate_zero_or_with_all_blocks_frozen():
    before, _ = start(SMALL)
    for config in (dataclasses.replace(SMALL, learning_rate=0.0), dataclasses.replace(SMALL, frozen=BLOCKS)):
        for b in BLOCKS:
            assert torch.equal(train(config).weights[b], before[b])


def test_fixed_attention_gives_queries_and_keys_no_gradient():
    history = train(dataclasses.replace(SMALL, fixed_attention="uniform"))
    assert float(history.gradient_norm["W_Q"].abs().max()) == 0
    assert float(history.gradient_norm["W_V"].min()) > 0
    assert torch.allclose(history.normalized_entropy, torch.ones_like(history.entropy))


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_recorded_quantities_at_uniform_attention_have_their_closed_forms():
    h = train(dataclasses.replace(EXACT, fixed_attention="uniform", spectral_every=1))
    n = 7
    assert torch.allclose(h.entropy, torch.full_like(h.entropy, math.log(n)))
    assert torch.allclose(h.query_entropy, h.entropy)
    assert torch.allclose(h.query_sum_of_squares, torch.full_like(h.entropy, 6 / n**2))
    for one in (h.frobenius_norm, h.column_mass, h.spectral_norm):
        assert torch.allclose(one, torch.ones_like(one))
    assert float(h.dead_rows.abs().max()) == 0


def test_recorded_quantities_at_a_sink_have_their_closed_forms():
    h = train(dataclasses.replace(EXACT, fixed_attention="one_token", spectral_every=1))
    assert float(h.entropy.abs().max()) == 0
    assert torch.allclose(h.frobenius_norm, torch.full_like(h.entropy, math.sqrt(7)))
    assert torch.allclose(h.spectral_norm, torch.full_like(h.spectral_norm, math.sqrt(7)))
    assert torch.allclose(h.column_mass, torch.full_like(h.entropy, 7.0))
    assert torch.allclose(h.query_sum_of_squares, torch.ones_like(h.entropy))


def test_sharpness_of_the_value_path_is_the_closed_form_of_its_batch():
    """λ = 2 λ_max(mean u uᵀ) with u = Σ p_j z_j, one layer and P fixed."""
    config = dataclasses.replace(
        EXACT, fixed_attention="uniform", sharpness_every=1, sharpness_blocks=("W_V",), steps=3, residual=False
    )
    history = train(config)
    for step in range(3):
        tokens, _ = sample_prompts(config.seeds, step, n_context=6, d=2, batch=4, dtype=torch.float64)
        u = tokens.mean(2)
        top = torch.linalg.eigvalsh(2 * torch.einsum("rbi,rbj->rij", u, u) / 4)[:, -1]
        assert torch.allclose(history.sharpness[:, step], top, rtol=1e-10)


def test_gradient_and_weight_norms_are_those_of_the_step():
    config = dataclasses.replace(EXACT, steps=1)
    history = train(config)
    before, _ = start(config)
    for b in BLOCKS:
        step = (before[b] - history.weights[b]) / config.learning_rate
        assert torch.allclose(history.gradient_norm[b][:, 0], step.flatten(2).norm(dim=2), rtol=1e-9)
        assert torch.allclose(history.weight_norm[b][:, 0], before[b].flatten(2).norm(dim=2))


def test_the_history_carries_its_config_and_version():
    history = train(SMALL)
    assert history.config == SMALL
    assert history.version == lipattn.__version__
    assert history.recorded_steps.tolist() == list(range(12))


# --- death ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dying():
    return train(TrainConfig(seeds=tuple(range(8)), learning_rate=2.0, steps=40))


def test_death_is_the_first_step_beyond_the_rule(dying):
    assert bool(dying.diverged.all())
    for run, step in enumerate(dying.diverged_at.tolist()):
        before = dying.loss[run, :step]
        assert bool((before <= DEAD_ABOVE * null_loss(2)).all())
        assert not bool(dying.loss[run, step] <= DEAD_ABOVE * null_loss(2)) or any(
            not math.isfinite(float(dying.gradient_norm[b][run, step].sum())) for b in BLOCKS
        )


def test_after_death_nothing_is_measured_and_weights_stay(dying):
    for run, step in enumerate(dying.diverged_at.tolist()):
        assert bool(dying.loss[run, step + 1 :].isnan().all())
        assert bool(dying.entropy[run, step + 1 :].isnan().all())
    shorter = train(dataclasses.replace(dying.config, steps=int(dying.diverged_at.max()) + 1))
    for b in BLOCKS:
        assert torch.equal(shorter.weights[b], dying.weights[b])


def test_the_last_value_is_the_one_before_death(dying):
    last = dying.last(dying.normalized_entropy)
    for run, step in enumerate(dying.diverged_at.tolist()):
        assert float(last[run, 0]) in dying.normalized_entropy[run, : step + 1, 0].tolist()
        assert bool(last[run].isfinite().all())


def test_evaluation_is_infinite_for_the_dead_and_the_loss_for_the_living(dying):
    assert bool(evaluate(dying).isinf().all())
    still = train(dataclasses.replace(SMALL, learning_rate=0.0))
    first = evaluate(still, batch=20_000)
    second = evaluate(still, batch=20_000, step=1)
    assert bool(first.isfinite().all())
    assert torch.allclose(first, second, rtol=0.15)
    assert not torch.equal(first, second)


def test_the_paper_setting_gives_the_same_verdict_in_both_precisions():
    config = TrainConfig(seeds=tuple(range(6)), learning_rate=0.5, steps=200, record_every=50)
    single, double = train(config), train(dataclasses.replace(config, dtype="float64"))
    assert torch.equal(single.diverged, double.diverged)
    assert bool(single.diverged.all())


def test_survival_has_the_wilson_interval():
    """95 % Wilson interval of 0 of 32, from its equation: z²/(n + z²) at the upper end."""
    z = 1.959963984540054
    got = survival(torch.ones(32, dtype=torch.bool))
    assert (got.alive, got.dead, got.n, got.low) == (0, 32, 32, pytest.approx(0, abs=1e-12))
    assert got.high == pytest.approx(z**2 / (32 + z**2), rel=1e-9)
    none_died = torch.zeros(3, dtype=torch.bool)
    got = survival(none_died)
    assert (got.fraction, got.low, got.high) == (1.0, pytest.approx(3 / (3 + z**2)), pytest.approx(1.0))
    with pytest.raises(ValueError, match="confidence=1"):
        survival(none_died, confidence=1.0)
    with pytest.raises(ValueError, match="diverged"):
        survival(none_died[:0])


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"reweighting": "sotfmax"},
        {"reweighting_options": {"temprature": 2.0}},
        {"d": 0},
        {"n_context": 0},
        {"batch": 0},
        {"layers": 0},
        {"heads": 0},
        {"optimizer": "sdg"},
        {"learning_rate": -0.1},
        {"learning_rate": math.nan},
        {"momentum": 1.0},
        {"betas": (0.9, 1.0)},
        {"epsilon": 0.0},
        {"weight_decay": 0.1},
        {"steps": -1},
        {"init_std": math.inf},
        {"logit_std": -1.0},
        {"frozen": ("W_O",)},
        {"frozen": "W_V"},
        {"fixed_attention": "diagonal"},
        {"record_every": 0},
        {"spectral_every": -1},
        {"sharpness_every": -1},
        {"sharpness_blocks": ()},
        {"sharpness_iterations": 0},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name_and_value(change):
    ((name, value),) = change.items()
    shown = {"reweighting_options": r"\['temprature'\]", "betas": "1.0", "seeds": r"\("}.get(name)
    with pytest.raises(ValueError, match=f"{name}=" + (shown or "")) as caught:
        TrainConfig(**change)
    if shown is None:
        assert repr(value) in str(caught.value)


def test_smallest_sizes_train():
    history = train(TrainConfig(seeds=(0,), d=1, n_context=1, batch=1, steps=3, learning_rate=0.01))
    assert bool(history.loss.isfinite().all())
    assert train(TrainConfig(seeds=(0,), steps=0)).loss.shape == (1, 0)


@pytest.mark.parametrize(("options", "name"), [({"temperature": 2.0}, "softmax"), ({"gain": 2.0}, "qk_layernorm")])
def test_options_reach_the_mechanism(options, name):
    base = dataclasses.replace(SMALL, reweighting=name, steps=1)
    assert not torch.equal(train(base).entropy, train(dataclasses.replace(base, reweighting_options=options)).entropy)
