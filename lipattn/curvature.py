r"""Curvature of the loss: Hessian-vector products and the largest eigenvalue, run by run.

Gradient descent with step η is stable along an eigenvector of the Hessian iff η·λ < 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from lipattn._validate import integer, refuse

__all__ = ["hessian_vector_product", "top_hessian_eigenvalue"]

Weights = Mapping[str, Tensor]


def _gradient(
    loss: Callable[[dict[str, Tensor]], Tensor], weights: Weights, blocks: tuple[str, ...]
) -> tuple[list[Tensor], Tensor]:
    """Leaves of the chosen blocks, and their gradient (runs, parameters) with its graph kept."""
    missing = [b for b in blocks if b not in weights]
    if missing or not blocks:
        raise refuse("blocks", f"a non-empty choice of {sorted(weights)}", blocks)
    leaves = {name: w.detach().requires_grad_(name in blocks) for name, w in weights.items()}
    with torch.enable_grad():
        value = loss(leaves)
        chosen = [leaves[b] for b in blocks]
        gradients = torch.autograd.grad(value.sum(), chosen, create_graph=True, materialize_grads=True)
        return chosen, torch.cat([g.flatten(1) for g in gradients], dim=1)


def _product(chosen: list[Tensor], gradient: Tensor, vector: Tensor) -> Tensor:
    if not gradient.requires_grad:  # a loss that is linear in these weights
        return torch.zeros_like(vector)
    product = torch.autograd.grad(gradient, chosen, vector, retain_graph=True, materialize_grads=True)
    return torch.cat([p.flatten(1) for p in product], dim=1)


def hessian_vector_product(
    loss: Callable[[dict[str, Tensor]], Tensor],
    weights: Weights,
    vector: Float[Tensor, "runs parameters"],
    *,
    blocks: tuple[str, ...],
) -> Float[Tensor, "runs parameters"]:
    r"""H v for each run, without forming H.

    .. math:: Hv = \nabla_w \big(v^\top \nabla_w L\big)

    Args:
        loss: weights → one loss a run, shape (runs,); runs must not interact.
        weights: tensors with a leading runs axis.
        vector: one a run, over the flattened blocks in the order of `blocks`.
        blocks: which weights the Hessian is taken in; the rest is held.

    Raises:
        ValueError: if `blocks` is empty or names a weight that is not there.

    Source: Pearlmutter, *Fast exact multiplication by the Hessian*, Neural Computation 6(1), 1994.
    """
    chosen, gradient = _gradient(loss, weights, blocks)
    return _product(chosen, gradient, vector)


def top_hessian_eigenvalue(
    loss: Callable[[dict[str, Tensor]], Tensor],
    weights: Weights,
    *,
    blocks: tuple[str, ...],
    iterations: int = 20,
) -> Float[Tensor, " runs"]:
    r"""Largest eigenvalue of each run's Hessian, by Lanczos with full re-orthogonalisation.

    The value is a Ritz value: never above λ_max up to rounding, equal to it once `iterations` reaches the number of
    parameters (or of distinct eigenvalues that the start vector sees). The start vector is fixed, without zeros.

    Args:
        loss, weights, blocks: as in :func:`hessian_vector_product`.
        iterations: Hessian-vector products at most.

    Returns:
        One value a run, in the loss's unit per squared weight; NaN for a run whose Hessian is not finite.

    Raises:
        ValueError: if `iterations` < 1 or `blocks` is bad.

    Source: Lanczos 1950; as sharpness along training: cohen2021gradient.
    """
    integer("iterations", iterations, minimum=1)
    chosen, gradient = _gradient(loss, weights, blocks)
    runs, size = gradient.shape
    iterations = min(iterations, size)
    index = torch.arange(1, size + 1, dtype=gradient.dtype, device=gradient.device)
    v = ((index * 0.6180339887498949) % 1 + 0.1).expand(runs, size)  # equidistributed, positive
    v = v / v.norm(dim=1, keepdim=True)
    basis, alphas, betas = [v], [], []
    for _ in range(iterations):
        w = _product(chosen, gradient, basis[-1]).detach()
        alphas.append((w * basis[-1]).sum(1))
        stacked = torch.stack(basis, dim=1)
        for _ in range(2):  # twice is enough
            w = w - torch.einsum("rkp,rk->rp", stacked, torch.einsum("rkp,rp->rk", stacked, w))
        beta = w.norm(dim=1)
        # An exhausted Krylov space leaves rounding noise: stop that run there.
        tiny = beta <= 50 * torch.finfo(w.dtype).eps * torch.stack(alphas).abs().amax(0).clamp_min(
            torch.finfo(w.dtype).tiny
        )
        betas.append(torch.where(tiny, torch.zeros_like(beta), beta))
        basis.append(torch.where(tiny[:, None], torch.zeros_like(w), w / torch.where(tiny, 1, beta)[:, None]))
    alpha, beta = torch.stack(alphas, dim=1).double(), torch.stack(betas[:-1] or betas, dim=1).double()
    # After the stop the basis is 0 and so are the alphas; give them the first Rayleigh quotient, which is <= λ_max.
    stopped = torch.stack([b.norm(dim=1) == 0 for b in basis[:-1]], dim=1)
    alpha = torch.where(stopped, alpha[:, :1], alpha)
    tridiagonal = torch.diag_embed(alpha)
    if iterations > 1:
        tridiagonal = tridiagonal + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    finite = tridiagonal.flatten(1).isfinite().all(1)
    tridiagonal = torch.where(finite[:, None, None], tridiagonal, torch.zeros_like(tridiagonal))
    top = torch.linalg.eigvalsh(tridiagonal)[:, -1]
    return torch.where(finite, top, torch.nan).to(gradient.dtype)
