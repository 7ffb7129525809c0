"""Adding a mechanism takes one function, one row and one oracle: the shared properties pass a right one and catch
wrong ones.

The toy: p_ij ∝ 1/(1 + ‖q_i − k_j‖²), a Cauchy kernel normalised over the keys that a query may attend.
"""

from dataclasses import replace

import pytest
import torch
from oracles import ORACLES
from test_reweighting import (
    PROPERTIES,
    agrees_with_the_oracle,
    agrees_with_the_oracle_at_defaults,
    dead_rows_exist_exactly_where_declared,
    declared_facts_fit_together,
    forbidden_keys_and_fully_masked_rows_have_no_gradient,
    gradients_agree_with_finite_differences,
    huge_logits_give_right_values_and_gradients,
    live_rows_sum_to_one_or_the_row_declares_otherwise,
    logits_are_bounded_exactly_as_declared,
    non_finite_data_give_rows_of_nan,
    scale_invariance_holds_exactly_where_declared,
    weights_are_non_negative_and_zero_where_forbidden,
    zero_and_constant_vectors_have_finite_gradients,
)

from lipattn.reweighting import LOGIT_OPTIONS, REWEIGHTINGS, Reweighting, dot_product_logits


# one function
def cauchy(q, k, allowed):
    closeness = 1 / (1 + (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))
    if allowed is not None:
        closeness = closeness.masked_fill(~allowed, 0.0)
    total = closeness.sum(-1, keepdim=True)
    return closeness / total.masked_fill(total == 0, 1.0)


# one row
ROW = Reweighting(
    name="cauchy",
    label="Cauchy kernel",
    source="ours",
    function=cauchy,
    row_stochastic=True,
    scale_invariant=False,
    linear_time=False,
    may_have_dead_rows=False,
)


# one oracle
def cauchy_oracle(q, k, allowed):
    rows = []
    for x, may in zip(q, allowed, strict=True):
        row = [
            1 / (1 + sum((a - b) ** 2 for a, b in zip(x, y, strict=True))) if yes else 0.0
            for y, yes in zip(k, may, strict=True)
        ]
        rows.append([w / sum(row) if sum(row) else 0.0 for w in row])
    return rows


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_a_right_mechanism_passes_every_shared_property(check, monkeypatch):
    monkeypatch.setitem(REWEIGHTINGS, "cauchy", ROW)
    monkeypatch.setitem(ORACLES, "cauchy", cauchy_oracle)
    check(REWEIGHTINGS["cauchy"], ORACLES["cauchy"])


def leaks_forbidden_keys(q, k, allowed):
    return cauchy(q, k, None)


def normalises_over_forbidden_keys_too(q, k, allowed):
    p = cauchy(q, k, None)
    return p if allowed is None else p.masked_fill(~allowed, 0.0)


def is_off_by_one_percent(q, k, allowed):
    return 1.01 * cauchy(q, k, allowed)


def is_spread_evenly_over_fully_masked_rows(q, k, allowed):
    p = cauchy(q, k, allowed)
    return torch.where((p == 0).all(-1, keepdim=True), 1 / p.shape[-1], p)


def hides_an_epsilon_in_the_normaliser(q, k, allowed):
    closeness = 1 / (1 + (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))
    closeness = closeness if allowed is None else closeness.masked_fill(~allowed, 0.0)
    return closeness / (closeness.sum(-1, keepdim=True) + 1e-6)


def drops_the_gradient_of_the_keys(q, k, allowed):
    return cauchy(q, k.detach(), allowed) + 0 * k.sum()


def hides_non_finite_data(q, k, allowed):
    return cauchy(q.nan_to_num(), k.nan_to_num(), allowed)


def has_a_root_at_the_zero_vector(q, k, allowed):
    return cauchy(q + 0 * q.square().sum(-1, keepdim=True).sqrt(), k, allowed)


def overflows_at_large_distances(q, k, allowed):
    distance = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    closeness = (1 + distance).pow(20) / (1 + distance).pow(21)
    closeness = closeness if allowed is None else closeness.masked_fill(~allowed, 0.0)
    total = closeness.sum(-1, keepdim=True)
    return closeness / total.masked_fill(total == 0, 1.0)


def has_negative_weights(q, k, allowed):
    return cauchy(q, k, allowed) - 1


WRONG_FUNCTIONS = [
    (leaks_forbidden_keys, weights_are_non_negative_and_zero_where_forbidden),
    (leaks_forbidden_keys, agrees_with_the_oracle),
    (normalises_over_forbidden_keys_too, live_rows_sum_to_one_or_the_row_declares_otherwise),
    (is_off_by_one_percent, live_rows_sum_to_one_or_the_row_declares_otherwise),
    (is_off_by_one_percent, agrees_with_the_oracle_at_defaults),
    (is_spread_evenly_over_fully_masked_rows, forbidden_keys_and_fully_masked_rows_have_no_gradient),
    (hides_an_epsilon_in_the_normaliser, live_rows_sum_to_one_or_the_row_declares_otherwise),
    (drops_the_gradient_of_the_keys, gradients_agree_with_finite_differences),
    (hides_non_finite_data, non_finite_data_give_rows_of_nan),
    (has_a_root_at_the_zero_vector, zero_and_constant_vectors_have_finite_gradients),
    (overflows_at_large_distances, huge_logits_give_right_values_and_gradients),
    (has_negative_weights, weights_are_non_negative_and_zero_where_forbidden),
]


@pytest.mark.parametrize(
    ("function", "check"), WRONG_FUNCTIONS, ids=lambda item: item.__name__ if callable(item) else str(item)
)
def test_a_wrong_mechanism_is_caught(function, check):
    with pytest.raises(AssertionError):
        check(replace(ROW, function=function), cauchy_oracle)


WRONG_DECLARATIONS = [
    ({"row_stochastic": False}, live_rows_sum_to_one_or_the_row_declares_otherwise),
    ({"scale_invariant": True}, scale_invariance_holds_exactly_where_declared),
    ({"may_have_dead_rows": True}, dead_rows_exist_exactly_where_declared),
    ({"linear_time": True}, declared_facts_fit_together),
    ({"options": {"width": 1.0}}, declared_facts_fit_together),
    ({"label": ""}, declared_facts_fit_together),
    ({"source": ""}, declared_facts_fit_together),
    (
        {"score": dot_product_logits, "options": LOGIT_OPTIONS, "bounded_logits": lambda d_k: 1.0},
        logits_are_bounded_exactly_as_declared,
    ),
]


@pytest.mark.parametrize(("facts", "check"), WRONG_DECLARATIONS, ids=lambda item: str(item)[:40])
def test_a_wrong_declaration_is_caught(facts, check):
    with pytest.raises(AssertionError):
        check(replace(ROW, **facts), cauchy_oracle)


def test_a_true_declaration_of_another_mechanism_is_caught_when_it_turns_false():
    with pytest.raises(AssertionError):
        scale_invariance_holds_exactly_where_declared(
            replace(REWEIGHTINGS["relu_kernel"], scale_invariant=False), ORACLES["relu_kernel"]
        )
    with pytest.raises(AssertionError):
        dead_rows_exist_exactly_where_declared(
            replace(REWEIGHTINGS["relu_kernel"], may_have_dead_rows=False), ORACLES["relu_kernel"]
        )
    with pytest.raises(AssertionError):
        logits_are_bounded_exactly_as_declared(
            replace(REWEIGHTINGS["qk_layernorm"], bounded_logits=lambda d_k: 1.01 * d_k**0.5), ORACLES["qk_layernorm"]
        )
