"""The generator is held to its authors' known-answer vectors and to the laws of what it claims to draw."""

import math

import pytest
import torch
from scipy import stats

from lipattn.philox import normal, philox4x32, uniform

KNOWN_ANSWERS = [  # Random123, kat_vectors, philox4x32 with 10 rounds
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values):
    return tuple(torch.tensor(v) for v in values)


def philox_in_python(counter, key):
    """Python's unbounded integers, line by line from the paper."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert tuple(int(w) for w in philox4x32(words(*counter), words(*key))) == answer


def test_words_equal_unbounded_integer_arithmetic(generator):
    draws = torch.randint(0, 2**32, (200, 6), generator=generator)
    got = torch.stack(philox4x32(tuple(draws[:, :4].T), tuple(draws[:, 4:].T)), dim=1)
    for row, out in zip(draws.tolist(), got.tolist(), strict=True):
        assert out == philox_in_python(row[:4], row[4:])


def test_a_value_depends_on_its_own_place_only():
    seeds, prompts = torch.arange(5), torch.arange(7)
    zero = torch.tensor(0)
    together = normal(9, seeds[:, None], (torch.tensor(3), prompts), stream=2)
    assert together.shape == (5, 7, 9)
    alone = normal(9, seeds[4], (torch.tensor(3), torch.tensor(6)), stream=2)
    assert torch.equal(together[4, 6], alone)
    assert torch.equal(normal(20, seeds[4], (torch.tensor(3), torch.tensor(6)), stream=2)[:9], alone)
    assert not torch.equal(normal(9, seeds[4], (zero, torch.tensor(6)), stream=2), alone)
    assert not torch.equal(normal(9, seeds[4], (torch.tensor(3), torch.tensor(6)), stream=1), alone)


def test_high_bits_of_the_seed_count():
    place = (torch.tensor(0), torch.tensor(0))
    assert not torch.equal(normal(4, torch.tensor(1), place, 0), normal(4, torch.tensor(1 + 2**32), place, 0))


def test_uniform_and_normal_have_their_distributions():
    place = (torch.tensor(0), torch.tensor(0))
    u = uniform(200_000, torch.tensor(11), place, stream=0)
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    z = normal(200_000, torch.tensor(11), place, stream=0)
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    pairs = z.view(-1, 2)
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 4 / math.sqrt(len(pairs))
    assert abs(float((pairs[1:, 0] * pairs[:-1, 0]).mean())) < 4 / math.sqrt(len(pairs))


def test_normal_is_box_muller_of_the_uniforms():
    place = (torch.tensor(5), torch.tensor(6))
    u = uniform(8, torch.tensor(7), place, stream=0).tolist()
    z = normal(8, torch.tensor(7), place, stream=0).tolist()
    for a, b, za, zb in zip(u[0::2], u[1::2], z[0::2], z[1::2], strict=True):
        r = math.sqrt(-2 * math.log(a))
        assert za == pytest.approx(r * math.cos(2 * math.pi * b), abs=1e-14)
        assert zb == pytest.approx(r * math.sin(2 * math.pi * b), abs=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, torch.tensor(1), 0), "count=0"),
        ((1, torch.tensor(1), -1), "stream=-1"),
        ((1, torch.tensor(1, dtype=torch.int32), 0), "seed=torch.int32"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    count, seed, stream = arguments
    with pytest.raises(ValueError, match=message):
        uniform(count, seed, (torch.tensor(0), torch.tensor(0)), stream)
