"""Orders of elimination: complete, as large as they say, and never worse than by the first rule alone."""

import itertools
import random

import pytest

from planner_core.search.algebra import elimination_order
from planner_core.search.algebra.elimination_order import TooWide, choose_elimination_order, num_entries

STAR = {"c": 10, "x": 10, "y": 10, "z": 10}


def largest_of(sequence: list[str], sizes: dict[str, int], scopes: list[tuple[str, ...]]) -> tuple[float, float]:
    """Entries of all tables, and of the largest, by joining the scopes one variable after the other."""
    left, total, largest = [set(s) for s in scopes], 0.0, 0.0
    for v in sequence:
        joined = set().union({v}, *(s for s in left if v in s))
        table = num_entries(joined, sizes)
        total, largest = total + table, max(largest, table)
        left = [s for s in left if v not in s] + [joined - {v}]
    return total, largest


def network(seed: int, number: int = 40) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """A chain with random shortcuts."""
    chance = random.Random(seed)
    names = [f"v{i}" for i in range(number)]
    near = list(itertools.pairwise(names))
    far = [tuple(chance.sample(names, 2)) for _ in range(number // 2)]
    return {v: chance.randint(2, 30) for v in names}, [*near, *far]


def other_orders(sizes: dict[str, int], scopes: list[tuple[str, ...]]) -> list[elimination_order._Order]:
    network = tuple(sizes.items()), tuple(scopes), ()
    return [*elimination_order._orders_by_rules(*network), *elimination_order._varied_orders(*network)]


def test_the_leaves_of_a_star_go_first() -> None:
    scopes = [("c", leaf) for leaf in "xyz"]
    assert largest_of(choose_elimination_order(STAR, scopes, ()), STAR, scopes)[1] == 100
    assert choose_elimination_order(STAR, scopes, ("x", "y", "z")) == ["c"]


@pytest.mark.parametrize("seed", range(8))
def test_more_rules_are_never_worse_than_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, scopes = network(seed)
    keep = ("v0", "v39")
    monkeypatch.setattr(elimination_order, "LARGE", float("inf"))
    monkeypatch.setattr(elimination_order, "MAX_TABLE", float("inf"))
    one = choose_elimination_order(sizes, scopes, keep)
    monkeypatch.setattr(elimination_order, "LARGE", 0)
    best = choose_elimination_order(sizes, scopes, keep)
    assert sorted(one) == sorted(best) == sorted(set(sizes) - set(keep))
    assert largest_of(best, sizes, scopes)[0] <= largest_of(one, sizes, scopes)[0]
    assert best == choose_elimination_order(sizes, scopes, keep)  # the same, whenever it is asked for


def test_some_network_gains_much() -> None:
    """Where the first rule needs large tables, which is why others are tried."""
    gains = []
    for seed in range(8):
        sizes, scopes = network(seed)
        first = elimination_order._smallest_table_order(tuple(sizes.items()), tuple(scopes), ())
        tried = other_orders(sizes, scopes)
        for found in (first, *tried):
            assert (found.total, found.largest) == pytest.approx(largest_of(list(found.sequence), sizes, scopes))
        gains.append(first.total / min(o.total for o in tried))
    assert max(gains) > 3


def test_another_rule_is_tried_before_a_network_is_refused() -> None:
    for seed in range(8):
        sizes, scopes = network(seed)
        first = elimination_order._smallest_table_order(tuple(sizes.items()), tuple(scopes), ())
        least = min(o.largest for o in other_orders(sizes, scopes))
        if least < first.largest:
            found = choose_elimination_order(sizes, scopes, (), largest=least)
            assert largest_of(found, sizes, scopes)[1] <= least
            with pytest.raises(TooWide):
                choose_elimination_order(sizes, scopes, (), largest=min(least, first.largest) - 1)
            return
    pytest.fail("no network of these shows it")


@pytest.mark.parametrize("seed", range(4))
def test_links_of_chains_leave_no_larger_table(seed: int) -> None:
    """What remains when they are gone has pairs alone, none of which is larger than the largest pair that was there."""
    sizes, scopes = network(seed)
    sizes["v7"] = 1  # one state ties nothing together
    keep = ("v0", "v39")
    head, near = elimination_order._eliminate_chains(sizes, tuple(scopes), keep)
    assert sorted((*head.sequence, *near)) == sorted(sizes) and {*keep} <= {*near}
    assert len(head.sequence) > len(sizes) / 8
    largest = max(num_entries(scope, sizes) for scope in scopes)
    assert all(sizes[v] * sizes[o] <= largest for v, others in near.items() for o in others)
    assert not any(elimination_order._is_chain_link(v, near, sizes) for v in near if v not in keep)


@pytest.mark.parametrize("seed", range(4))
def test_the_fill_is_what_counting_anew_gives(seed: int) -> None:
    """After each elimination, of every variable that is left."""
    sizes, scopes = network(seed, 30)
    neighbours = elimination_order._neighbours(sizes, [*scopes, ("v3", "v9", "v20", "v27")])
    graph = elimination_order._GraphWithFill.of(sizes, neighbours)
    for v in random.Random(seed).sample(sorted(sizes), len(sizes)):
        before = {o: graph.weighted_fill(o) for o in graph.neighbours}
        changed = graph.eliminate(v)
        for o, others in graph.neighbours.items():
            missing = [(a, b) for a, b in itertools.combinations(others, 2) if b not in graph.neighbours[a]]
            assert graph.fill[o] == sum(graph.bits[a] * graph.bits[b] for a, b in missing)
            assert o in changed or graph.weighted_fill(o) == before[o]
    assert not graph.neighbours
