"""Places the copies of a rank's state on the hosts of its island, and says what that survives.

Every host keeps the state of its own ranks, and so do m - 1 others. Pure integers and fractions.

    m divides N     N / m groups of m hosts; each keeps the states of its whole group
    otherwise       floor(N / m) - 1 such groups, and a ring of the m + (N mod m) hosts that are
                    left; there each state lies on its own host and the next m - 1

Groups are the best placement there is; the ring loses at most (2m - 3) / C(N, m) against the bound.
What is lost together is a host: the memory of the copies belongs to its supervisor, so that killed
ranks, however many, lose none of them.

Source: GEMINI (SOSP 2023), mixed placement and its probability of recovery.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb


def hosts_of_copies(num_hosts: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """Say which hosts keep the state of each host, its own first.

    Args:
        num_hosts: Hosts of the island, N >= 1.
        copies: Hosts that keep each state, m, from 1 (the own one alone) to N.

    Returns:
        By host, m different hosts. Every host keeps the states of exactly m hosts.

    Raises:
        ValueError: If `copies` is out of range.
    """
    _insist(num_hosts, copies)
    first_of_ring = _num_groups(num_hosts, copies) * copies
    kept = []
    for host in range(num_hosts):
        if host < first_of_ring:
            first, size = host - host % copies, copies
        else:
            first, size = first_of_ring, num_hosts - first_of_ring
        kept.append(tuple(first + (host - first + i) % size for i in range(copies)))
    return tuple(kept)


def ranks_of_copies(num_ranks: int, num_hosts: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """Say which ranks keep the state of each rank, itself first: on other hosts, its counterparts.

    Args:
        num_ranks: Ranks of the island, a multiple of its hosts; hosts hold consecutive ones.
        num_hosts: As for `hosts_of_copies`.
        copies: As for `hosts_of_copies`.

    Raises:
        ValueError: If a number is out of range.
    """
    if num_ranks < 1 or num_ranks % num_hosts:
        raise ValueError(f"{num_ranks} ranks cannot be spread evenly over {num_hosts} hosts")
    here = num_ranks // num_hosts
    hosts = hosts_of_copies(num_hosts, copies)
    return tuple(
        tuple(host * here + rank % here for host in hosts[rank // here])
        for rank in range(num_ranks)
    )


def recovery_probability(num_hosts: int, copies: int, num_lost: int) -> Fraction:
    """Compute the probability that k hosts, lost at once and any equally likely, cost no state.

    A state is lost with all m hosts that keep it. With g groups, and a ring of R hosts (m < R < 2m)
    or none, the losses of k hosts that cost nothing are counted by the coefficient of x^k in

        ((1 + x)^m - x^m)^g  *  sum_j (C(R, j) - b_j) x^j

    where b_j counts the sets of j hosts of the ring with m neighbours among them: of such runs a
    ring of R < 2m has one at most, which starts behind one of R survivors, so that
    b_j = R C(R - m - 1, j - m) for m <= j < R, and b_R = 1. The probability is that coefficient
    over C(N, k). It is 1 for k < m, and at least max(0, 1 - (N/m) C(N-m, k-m) / C(N, k)) where m
    divides N: 14/15 = 93.3 % for N = 16, m = 2, k = 2.

    Args:
        num_hosts: N, at least 1.
        copies: m, from 1 to N.
        num_lost: k, from 0 to N.

    Returns:
        The exact probability.

    Raises:
        ValueError: If a number is out of range.

    Source: GEMINI (SOSP 2023), which gives the bound; the count is exact.
    """
    _insist(num_hosts, copies)
    if not 0 <= num_lost <= num_hosts:
        raise ValueError(f"{num_lost} lost hosts: must be from 0 to {num_hosts}")
    num_groups = _num_groups(num_hosts, copies)
    ring = num_hosts - num_groups * copies
    harmless = [comb(ring, j) - _num_costly(ring, copies, j) for j in range(ring + 1)]
    group = [comb(copies, j) for j in range(copies)]  # all but the loss of the whole group
    for _ in range(num_groups):
        harmless = _product(harmless, group)
    count = harmless[num_lost] if num_lost < len(harmless) else 0
    return Fraction(count, comb(num_hosts, num_lost))


def _insist(num_hosts: int, copies: int) -> None:
    if not 1 <= copies <= num_hosts:
        raise ValueError(f"{copies} copies on {num_hosts} hosts: must be from 1 to the hosts")


def _num_groups(num_hosts: int, copies: int) -> int:
    """Count the groups; the hosts that are left form the ring."""
    return num_hosts // copies - (num_hosts % copies > 0)


def _num_costly(ring: int, copies: int, num_lost: int) -> int:
    """Count the sets of `num_lost` hosts of the ring with `copies` neighbours among them."""
    if ring == 0 or num_lost < copies:
        return 0
    return 1 if num_lost == ring else ring * comb(ring - copies - 1, num_lost - copies)


def _product(left: list[int], right: list[int]) -> list[int]:
    """Multiply two polynomials, given by their coefficients."""
    result = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            result[i + j] += a * b
    return result
