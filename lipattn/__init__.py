"""Attention re-weightings, their diagnostics, and training runs that live or die by them.

Importing this loads the maths only. Figures (`lipattn.figures`), explorers (`lipattn.widgets`) and the book's tools
(`lipattn.book`) are imported by name and need their extras.
"""

__version__ = "0.1.0"

from lipattn import curvature, diagnostics, lipschitz, model, philox, reweighting, tasks, theory, training
from lipattn.curvature import hessian_vector_product, top_hessian_eigenvalue
from lipattn.diagnostics import (
    CollapseKind,
    collapse_kind,
    column_mass,
    dead_row_count,
    entropy,
    entropy_from_logits,
    frobenius_norm,
    gradient_norms,
    live_mean,
    live_rows,
    logit_variance,
    normalized_entropy,
    renyi2_entropy,
    spectral_norm,
    sum_of_squares,
)
from lipattn.lipschitz import LipschitzBound
from lipattn.model import fixed_attention_weights, forward, init_weights, predict
from lipattn.reweighting import REWEIGHTINGS, Reweighting, causal_mask, linear_attention
from lipattn.tasks import Prompts, sample_prompts
from lipattn.training import History, Survival, TrainConfig, evaluate, survival, train

__all__ = [
    "REWEIGHTINGS",
    "CollapseKind",
    "History",
    "LipschitzBound",
    "Prompts",
    "Reweighting",
    "Survival",
    "TrainConfig",
    "causal_mask",
    "collapse_kind",
    "column_mass",
    "curvature",
    "dead_row_count",
    "diagnostics",
    "entropy",
    "entropy_from_logits",
    "evaluate",
    "fixed_attention_weights",
    "forward",
    "frobenius_norm",
    "gradient_norms",
    "hessian_vector_product",
    "init_weights",
    "linear_attention",
    "lipschitz",
    "live_mean",
    "live_rows",
    "logit_variance",
    "model",
    "normalized_entropy",
    "philox",
    "predict",
    "renyi2_entropy",
    "reweighting",
    "sample_prompts",
    "spectral_norm",
    "sum_of_squares",
    "survival",
    "tasks",
    "theory",
    "top_hessian_eigenvalue",
    "train",
    "training",
]
