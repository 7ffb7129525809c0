"""The top eigenvalue against a Hessian that is written down, run by run."""

from itertools import pairwise

import pytest
import torch

from lipattn.curvature import hessian_vector_product, top_hessian_eigenvalue


def quadratic(matrices):
    """Loss ½ wᵀAw for each run, with w made of two blocks."""

    def loss(weights):
        w = torch.cat([weights["a"].flatten(1), weights["b"].flatten(1)], dim=1)
        return 0.5 * torch.einsum("ri,rij,rj->r", w, matrices, w)

    return loss


@pytest.fixture
def problem(generator):
    half = torch.randn(4, 7, 7, generator=generator)
    matrices = half + half.mT  # indefinite
    weights = {"a": torch.randn(4, 2, 2, generator=generator), "b": torch.randn(4, 3, generator=generator)}
    return matrices, weights


def test_product_is_the_matrix_product(problem, generator):
    matrices, weights = problem
    v = torch.randn(4, 7, generator=generator)
    got = hessian_vector_product(quadratic(matrices), weights, v, blocks=("a", "b"))
    assert torch.allclose(got, torch.einsum("rij,rj->ri", matrices, v))
    block = hessian_vector_product(quadratic(matrices), weights, v[:, 4:], blocks=("b",))
    assert torch.allclose(block, torch.einsum("rij,rj->ri", matrices[:, 4:, 4:], v[:, 4:]))


@pytest.mark.parametrize(("blocks", "part"), [(("a", "b"), slice(0, 7)), (("a",), slice(0, 4)), (("b",), slice(4, 7))])
def test_top_eigenvalue_is_exact_when_iterations_reach_the_size(problem, blocks, part):
    matrices, weights = problem
    expected = torch.linalg.eigvalsh(matrices[:, part, part])[:, -1]
    assert torch.allclose(top_hessian_eigenvalue(quadratic(matrices), weights, blocks=blocks), expected, rtol=1e-10)


def test_fewer_iterations_never_exceed_the_truth_and_improve(generator):
    half = torch.randn(6, 40, 40, generator=generator)
    matrices = half @ half.mT
    weights = {"a": torch.zeros(6, 20), "b": torch.zeros(6, 20)}
    truth = torch.linalg.eigvalsh(matrices)[:, -1]
    estimates = [
        top_hessian_eigenvalue(quadratic(matrices), weights, blocks=("a", "b"), iterations=k) for k in (1, 3, 8, 20)
    ]
    for worse, better in pairwise(estimates):
        assert bool((better >= worse - 1e-9).all())
    assert bool((estimates[-1] <= truth * (1 + 1e-12)).all())
    assert torch.allclose(estimates[-1], truth, rtol=1e-6)


def test_exhausted_krylov_space_is_no_error():
    """Multiples of the identity end after one step; a zero and a negative Hessian have tops 0 and −3."""
    matrices = torch.stack([2 * torch.eye(7), torch.zeros(7, 7), -3 * torch.eye(7)])
    weights = {"a": torch.ones(3, 4), "b": torch.ones(3, 3)}
    got = top_hessian_eigenvalue(quadratic(matrices), weights, blocks=("a", "b"), iterations=5)
    assert torch.allclose(got, torch.tensor([2.0, 0.0, -3.0]), atol=1e-12)


def test_a_run_that_is_not_finite_touches_no_other(problem):
    matrices, weights = problem
    clean = top_hessian_eigenvalue(quadratic(matrices), weights, blocks=("a", "b"))
    matrices = matrices.clone()
    matrices[1] = torch.inf
    got = top_hessian_eigenvalue(quadratic(matrices), weights, blocks=("a", "b"))
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])
    assert bool(got[1].isnan())


def test_loss_linear_in_the_block_has_no_curvature():
    weights = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    got = top_hessian_eigenvalue(lambda w: (w["a"] * w["b"].square()).sum(1), weights, blocks=("a",))
    assert torch.equal(got, torch.zeros(2))


@pytest.mark.parametrize("blocks", [(), ("c",)])
def test_bad_blocks_are_refused(problem, blocks):
    with pytest.raises(ValueError, match="blocks"):
        top_hessian_eigenvalue(quadratic(problem[0]), problem[1], blocks=blocks)


def test_bad_iterations_are_refused(problem):
    with pytest.raises(ValueError, match="iterations=0"):
        top_hessian_eigenvalue(quadratic(problem[0]), problem[1], blocks=("a",), iterations=0)
