"""Each switch of the paper's graft on its own, the named grafts, and the laws for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_cases import Case, Rule, TooLarge, World, cases
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from table_models import hashed_model
from test_treegraft_graft import NONE, Lookup, Scorer, V, assert_law_3, assert_sound, lm, nodes

from treegraft.backends.exact import ExactLedger, ExactTraversal, ExactVerifier, ExactWalk
from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.components import build_component
from treegraft.core.errors import TreeError
from treegraft.core.roles import Drafter, GraftPolicy, TreeBackend
from treegraft.core.tree import ROOT, Proposals
from treegraft.policies.builders import BestFirstConfig, ChainConfig, StaticConfig
from treegraft.policies.grafts import (
    BudgetSwapConfig,
    BudgetSwapGraft,
    ReplaceConfig,
    ReplaceGraft,
    TreegraftConfig,
    TreegraftGraft,
    UnionConfig,
    UnionGraft,
)

# Token 1 is likely, 4 a little less, 3 is not.
TABLE = (-9.0, -0.1, -9.0, -5.0, -0.2, -9.0)


@pytest.fixture(params=[TensorTree, ReferenceTree], ids=["tensor", "reference"])
def tree(request: pytest.FixtureRequest) -> TreeBackend:
    made: TreeBackend = request.param(V)
    made.reset_(token=0, max_depth=9)
    return made


def graft(**options: Any) -> TreegraftGraft:
    return TreegraftGraft(TreegraftConfig(**options))


def grown(tree: TreeBackend) -> TreeBackend:
    """What look-ups drafted: [1], [3] and [3, 4]; nodes 1, 2, 3."""
    lookup = Lookup([1], [3])
    graft().visit(tree, lookup, 0, nodes(ROOT), width=2)
    lookup.paths = ([4],)
    graft().visit(tree, lookup, 0, nodes(2), width=2)
    return tree


# --- rescore --------------------------------------------------------------------------------------


def test_without_rescoring_the_first_score_of_a_node_stands(tree: TreeBackend) -> None:
    scorer = Scorer(*TABLE)
    graft(rescore="never").visit(grown(tree), scorer, 1, nodes(3), width=2)
    # By the look-up's scores [1] and [3] are equal, so the older one is taken after the root.
    assert scorer.positions == [ROOT, 1]
    assert tree.logprob[:4].tolist() == [0.0, -0.5, -0.5, -1.0]
    assert tree.scorer[:4].tolist() == [-1, 0, 0, 0]
    # What the scorer brought is scored under what stood there.
    assert [tree.path(v) for v in (4, 5, 6)] == [[4], [1, 1], [1, 4]]
    torch.testing.assert_close(tree.logprob[4:], torch.tensor([-0.2, -0.6, -0.7]))
    policy = graft(rescore="never")
    assert policy.finish(tree, {0: Lookup(), 1: scorer}, (0, 1), 2, 9) == ()


def test_rescoring_once_scores_the_whole_tree_at_the_end(tree: TreeBackend) -> None:
    policy = graft(rescore="once")
    cheap, dear, idle = Scorer(*[-7.0] * V), Scorer(*TABLE), Scorer(*[-8.0] * V)
    drafters: dict[int, Drafter] = {0: Lookup(), 1: cheap, 2: dear, 3: idle}
    for calls, index in (((0, 1), 1), ((0, 2, 1), 2), ((2, 2), 2)):
        tree.reset_(0, 9)
        policy.visit(grown(tree), dear, 2, nodes(3), width=2)
        assert tree.logprob[1:4].tolist() == [-0.5, -0.5, -1.0]
        # The dearest that acted, not the dearest there is.
        assert policy.finish(tree, drafters, calls, 2, 9) == (index,)
        table = dear.table if index == 2 else cheap.table
        edges = tree.logprob - tree.logprob[tree.parent]
        torch.testing.assert_close(edges[1:], table[tree.token[1:]])
        assert tree.scorer[1:].tolist() == [index] * (tree.n_nodes - 1)
    # Nobody that scores acted, or its context has no room any more.
    before = tree.logprob.clone()
    assert policy.finish(tree, drafters, (0, 0), 2, 9) == ()
    assert policy.finish(tree, {0: Lookup()}, (0, 2), 2, 9) == ()
    assert torch.equal(tree.logprob, before)


def test_rescoring_every_visit_leaves_nothing_to_finish(tree: TreeBackend) -> None:
    policy, scorer = graft(), Scorer(*TABLE)
    policy.visit(grown(tree), scorer, 1, nodes(3), width=2)
    assert policy.finish(tree, {1: scorer}, (0, 1), 2, 9) == ()


# --- reselect, recover, reach ---------------------------------------------------------------------


def test_without_reselecting_the_frontier_is_expanded_whole(tree: TreeBackend) -> None:
    scorer = Scorer(*TABLE)
    policy = graft(reselect=False)
    policy.visit(grown(tree), scorer, 1, nodes(3, 1), width=1)
    assert scorer.positions == [3, 1]  # in the builder's order, and however many
    # Whom it has expanded before it leaves out, unless it may revisit.
    policy.visit(tree, scorer, 1, nodes(3, 2), width=1)
    assert scorer.positions == [2]
    graft(reselect=False, revisit=True).visit(tree, scorer, 1, nodes(3, 2), width=1)
    assert scorer.positions == [3, 2]
    assert policy.visit(tree, scorer, 1, nodes(3, 2), width=1).nodes.tolist() == []


def test_without_recovery_only_leaves_are_taken(tree: TreeBackend) -> None:
    """[3] has a child and the root has two: neither is taken up again."""
    scorer = Scorer(*TABLE)
    graft(recover=False).visit(grown(tree), scorer, 1, nodes(3), width=9 % V)
    assert scorer.positions == [1, 3]
    graft(recover=False).visit(tree, scorer, 2, nodes(1, 2), width=1)
    # After the first visit [1] and [3, 4] are inner nodes too; their children lie below.
    assert scorer.positions == [1, 3]
    touched = graft(recover=False, reselect=False).visit(tree, scorer, 3, nodes(1), width=1)
    assert touched.nodes.tolist() == []


def test_a_bare_root_is_a_leaf(tree: TreeBackend) -> None:
    scorer = Scorer(*TABLE)
    graft(recover=False, lookback=0).visit(tree, scorer, 1, nodes(ROOT), width=2)
    assert scorer.positions == [ROOT]


def test_with_any_reach_what_lies_below_the_frontier_competes(tree: TreeBackend) -> None:
    scorer = Scorer(*TABLE)
    for reach, lookback, expected in (
        ("frontier", 0, [1]),
        ("frontier", 9, [ROOT, 1]),
        ("any", 0, [ROOT, 1, 2, 3]),
    ):
        tree.reset_(0, 9)
        tree.add_(Proposals.of_paths([ROOT], [[1, 4, 1]], [[-0.5, NONE, NONE]], [3]), 0, False)
        policy = graft(reach=reach, lookback=lookback)
        policy.visit(tree, scorer, 1, nodes(1), width=V - 2)
        assert scorer.positions == expected


def test_any_reach_without_reselecting_is_refused() -> None:
    with pytest.raises(ValidationError, match="reach any needs reselect true, found false"):
        TreegraftConfig(reach="any", reselect=False)


# --- named grafts ---------------------------------------------------------------------------------


def test_union_extends_the_frontier_and_keeps_scores(tree: TreeBackend) -> None:
    scorer = Scorer(*TABLE)
    touched = UnionGraft(UnionConfig()).visit(grown(tree), scorer, 1, nodes(3, 1), width=2)
    assert scorer.positions == [3, 1]
    assert tree.logprob[:4].tolist() == [0.0, -0.5, -0.5, -1.0]
    assert [tree.path(node) for node in touched.nodes.tolist()] == [
        *([3, 4, 1], [3, 4, 4], [1, 1], [1, 4]),
    ]
    # A node that exists is touched and keeps its score.
    before = tree.logprob.clone()
    UnionGraft(UnionConfig()).visit(tree, Scorer(*[-3.0] * V), 2, nodes(ROOT), width=2)
    assert torch.equal(tree.logprob[: len(before)], before)


def test_replace_throws_away_what_look_ups_drafted_and_no_more(tree: TreeBackend) -> None:
    policy, scorer, second = ReplaceGraft(ReplaceConfig()), Scorer(*TABLE), Scorer(*TABLE)
    for _ in range(2):  # the second time in a new step
        tree.reset_(0, 9)
        touched = policy.visit(grown(tree), scorer, 1, nodes(3), width=2)
        assert scorer.positions == [ROOT]
        # [1] was there and comes back as the scorer's own; [3] and [3, 4] are gone.
        assert [tree.path(node) for node in touched.nodes.tolist()] == [[1], [4]]
        alive = tree.alive.nonzero()[:, 0].tolist()
        assert [tree.path(node) for node in alive] == [[], [1], [4]]
        assert tree.source[alive].tolist() == [-1, 1, 1]
        # Look-ups may add to it, and no later visit throws anything away.
        policy.visit(tree, Lookup([5]), 0, touched.nodes, width=2)
        n_alive = int(tree.alive.sum())
        policy.visit(tree, scorer, 1, touched.nodes, width=2)
        policy.visit(tree, second, 2, touched.nodes, width=2)
        assert int(tree.alive.sum()) > n_alive
        assert bool(tree.alive[tree.source == 0].any())


def test_replace_refuses_to_lose_a_draw(tree: TreeBackend) -> None:
    class Drawing(Lookup):
        def propose(self, tree: TreeBackend, positions: torch.Tensor, width: int) -> Proposals:
            made = super().propose(tree, positions, width)
            q = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
            return replace(made, draw=torch.zeros(1, dtype=torch.int64), q=q)

    policy = ReplaceGraft(ReplaceConfig())
    policy.visit(tree, Drawing([1]), 0, nodes(ROOT), width=1)
    before = tree.alive.clone()
    with pytest.raises(TreeError, match=r"^graft.kind 'replace' .* found 1 draws; use another"):
        policy.visit(tree, Scorer(*TABLE), 1, nodes(1), width=1)
    assert torch.equal(tree.alive, before)
    swap = BudgetSwapGraft(BudgetSwapConfig(swap=2))
    with pytest.raises(TreeError, match=r"^graft.kind 'budget_swap' .* found draws of drafter 0"):
        swap.finish(tree, {0: Drawing([1])}, (0,), 1, 9)


def test_budget_swap_gives_places_to_look_ups(tree: TreeBackend) -> None:
    """Budget 4, swap 3: one node stays, and the look-up's paths fill three places."""
    policy, scorer = BudgetSwapGraft(BudgetSwapConfig(swap=3)), Scorer(*TABLE)
    policy.visit(tree, scorer, 1, nodes(ROOT), width=3)  # [1] -0.1, [4] -0.2, [3] -5
    lookup = Lookup([2, 5], [5, 5, 5])
    assert policy.finish(tree, {0: lookup, 1: scorer}, (1,), 3, 4) == [0]
    assert lookup.positions == [1]  # the only leaf that was kept
    pruned = tree.prune(4)
    assert [pruned.path(i) for i in range(len(pruned))] == [[], [1], [1, 2], [1, 2, 5], [1, 5]]


def test_budget_swap_takes_the_longest_match_first(tree: TreeBackend) -> None:
    class Ranked(Lookup):
        def propose(self, tree: TreeBackend, positions: torch.Tensor, width: int) -> Proposals:
            made = super().propose(tree, positions, width)
            return replace(made, match=torch.arange(1, 1 + made.match.shape[0]))

    policy = BudgetSwapGraft(BudgetSwapConfig(swap=2))
    lookup, late = Ranked([2, 3], [5]), Lookup([4])
    tree.add_(Proposals.of_paths([ROOT] * 2, [[1], [4]], [[-0.1], [-0.2]]), 1, True)
    assert policy.finish(tree, {0: lookup, 1: Scorer(*TABLE), 2: late}, (1,), 2, 4) == [0]
    # Under [1]: [2, 3] match 1 and [5] match 2; under [4]: [2, 3] match 3 and [5] match 4.
    assert [tree.path(node) for node in range(3, tree.n_nodes)] == [[4, 5], [4, 2]]


@pytest.mark.parametrize(("swap", "budget", "expected"), [(9, 4, 4), (1, 9, 4), (2, 2, 2)])
def test_budget_swap_never_passes_the_budget(
    tree: TreeBackend, swap: int, budget: int, expected: int
) -> None:
    policy = BudgetSwapGraft(BudgetSwapConfig(swap=swap))
    policy.visit(tree, Scorer(*TABLE), 1, nodes(ROOT), width=3)
    policy.finish(tree, {0: Lookup([2, 5, 2, 5, 2], [5])}, (1,), 3, budget)
    assert int(tree.alive.sum()) - 1 == expected
    assert len(tree.prune(budget)) - 1 == expected


# --- the laws -------------------------------------------------------------------------------------

SWITCHES = st.builds(
    TreegraftConfig,
    rescore=st.sampled_from(["every_visit", "once", "never"]),
    recover=st.booleans(),
    lookback=st.integers(0, 4),
    revisit=st.booleans(),
    reach=st.sampled_from(["frontier", "any"]),
) | st.builds(
    TreegraftConfig,
    rescore=st.sampled_from(["every_visit", "once", "never"]),
    reselect=st.just(False),
    recover=st.booleans(),
    revisit=st.booleans(),
)
GRAFTS = st.one_of(
    SWITCHES,
    st.just(UnionConfig()),
    st.builds(ReplaceConfig, lookback=st.integers(0, 4), revisit=st.booleans()),
    st.builds(BudgetSwapConfig, swap=st.integers(1, 6), lookback=st.integers(0, 4)),
)
VISITS = st.lists(
    st.one_of(
        st.lists(st.lists(st.integers(-1, V), min_size=1, max_size=3), max_size=4),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=5,
)


def run(
    policy: GraftPolicy,
    tree: TreeBackend,
    visits: list[list[list[int]] | int],
    width: int,
    budget: int,
    after: Callable[[int | None], None] = lambda index: None,
) -> None:
    """A step: visits of models 0..2 and of look-ups (number 3), then the policy's own finish."""
    models = [lm(hashed_model(V, seed=seed)) for seed in range(3)]
    tree.reset_(2, 6, budget)
    frontier, calls = nodes(ROOT), []
    lookup: Drafter = Lookup()
    for visit in visits:
        index = visit if isinstance(visit, int) else 3
        drafter = models[index] if isinstance(visit, int) else Lookup(*visit)
        lookup = lookup if isinstance(visit, int) else drafter
        touched = policy.visit(tree, drafter, index, frontier, width)
        assert_sound(tree, touched)
        after(visit if isinstance(visit, int) else None)
        reached = tree.rank(touched.nodes, touched.match, width)
        frontier = reached if len(reached) else frontier
        calls.append(index)
    policy.finish(tree, {**dict(enumerate(models)), 3: lookup}, calls, width, budget)


@given(config=GRAFTS, visits=VISITS, width=st.integers(1, 4), budget=st.integers(0, 9))
def test_both_trees_agree_under_every_graft(
    config: BaseModel, visits: list[list[list[int]] | int], width: int, budget: int
) -> None:
    trees: list[TreeBackend] = [TensorTree(V), ReferenceTree(V)]
    for tree in trees:
        run(build_component("graft", config), tree, visits, width, budget)
    for column in ("token", "parent", "logprob", "source", "scorer", "alive", "leaf"):
        assert torch.equal(getattr(trees[0], column), getattr(trees[1], column)), column
    pruned = trees[0].prune(budget)
    pruned.check()
    assert torch.equal(pruned.node, trees[1].prune(budget).node)
    if isinstance(config, BudgetSwapConfig):
        assert int(trees[0].alive.sum()) <= budget + 1


@given(config=SWITCHES, visits=VISITS, width=st.integers(1, 4))
def test_no_switch_makes_the_graft_destructive(
    config: TreegraftConfig, visits: list[list[list[int]] | int], width: int
) -> None:
    """Law 2 for all switches; law 3 after each visit, or at the end, or not at all."""
    tree = TensorTree(V)
    paths: list[list[int]] = []

    def after(index: int | None) -> None:
        assert [tree.path(node) for node in range(len(paths))] == paths
        paths[:] = [tree.path(node) for node in range(tree.n_nodes)]
        if index is not None and config.rescore == "every_visit":
            assert_law_3(tree, hashed_model(V, seed=index), index)

    run(TreegraftGraft(config), tree, visits, width, 9, after)
    assert [tree.path(node) for node in range(tree.n_nodes)] == paths
    assert bool(tree.alive.all())
    acted = [visit for visit in visits if isinstance(visit, int)]
    if config.rescore == "once" and acted:
        assert_law_3(tree, hashed_model(V, seed=max(acted)), max(acted))


@given(visits=VISITS, width=st.integers(1, 4))
def test_union_is_the_graft_with_its_switches_off(
    visits: list[list[list[int]] | int], width: int
) -> None:
    off = TreegraftConfig(rescore="never", reselect=False, revisit=True)
    trees = [TensorTree(V), TensorTree(V)]
    run(UnionGraft(UnionConfig()), trees[0], visits, width, 9)
    run(TreegraftGraft(off), trees[1], visits, width, 9)
    for column in ("token", "parent", "logprob", "source", "scorer"):
        assert torch.equal(getattr(trees[0], column), getattr(trees[1], column)), column


# --- drawn children -------------------------------------------------------------------------------

COIN = World(n_ids=3, order=1, seed=5)
DRAWS_TWO, LOOKS_UP = Rule(1, n_drawn=2), Rule(2, path=(1, 0))


def is_exact(case: Case, verifier: type[ExactVerifier], **more: Any) -> bool:
    found = case.law_of_step(verifier, 4, **more)
    return found == case.world.law_of_texts(case.prompt, 4)


@pytest.mark.parametrize("verifier", [ExactLedger, ExactTraversal])
@pytest.mark.parametrize(
    "case",
    [
        Case(COIN, (LOOKS_UP, DRAWS_TWO), (0, 1), 1, 3, 1, None, graft=ReplaceConfig()),
        Case(COIN, (LOOKS_UP, DRAWS_TWO), (1,), 1, 3, 1, None, graft=BudgetSwapConfig(swap=2)),
        Case(COIN, (DRAWS_TWO,), (0, 0), 1, 0, 1, None, most_draws=2, builder=ChainConfig(depth=2)),
        Case(
            *(COIN, (DRAWS_TWO,), (0,), 1, 0, 1, None),
            graft=UnionConfig(),
            builder=StaticConfig(paths=((1,),)),
        ),
    ],
    ids=["replace", "budget_swap", "chain", "static"],
)
def test_drawn_children_keep_the_targets_law(case: Case, verifier: type[ExactVerifier]) -> None:
    assert is_exact(case, verifier)


SHAPES = st.one_of(
    st.none(),
    st.builds(BestFirstConfig, depth=st.just(3), width=st.integers(1, 3), budget=st.integers(0, 6)),
    st.builds(ChainConfig, depth=st.just(3)),
    st.sampled_from([((0,), (1,), (0, 0)), ((1,), (1, 0), (1, 0, 1), (0,)), ((2,),)]).map(
        lambda paths: StaticConfig(paths=paths)
    ),
)


@pytest.mark.parametrize("verifier", [ExactWalk, ExactLedger, ExactTraversal])
@given(case=cases(), graft=GRAFTS, shape=SHAPES)
@settings(suppress_health_check=list(HealthCheck))
def test_every_graft_and_builder_keeps_the_targets_law(
    verifier: type[ExactVerifier], case: Case, graft: BaseModel, shape: BaseModel | None
) -> None:
    try:
        case = replace(case, graft=graft, builder=shape)
        assert is_exact(case, verifier, most_outcomes=300)
    except TooLarge:
        reject()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [ExactLedger, ExactTraversal])
@given(case=cases(), graft=GRAFTS, shape=SHAPES)
@settings(max_examples=400, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_graft_and_builder_keeps_the_targets_law_at_length(
    verifier: type[ExactVerifier], case: Case, graft: BaseModel, shape: BaseModel | None
) -> None:
    try:
        case = replace(case, graft=graft, builder=shape)
        assert is_exact(case, verifier, most_outcomes=3000)
    except TooLarge:
        reject()
